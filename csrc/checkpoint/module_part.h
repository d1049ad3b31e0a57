// The part of a model in a checkpoint: its parameters and buffers, and perhaps gradients.
#pragma once

#include <torch/nn/module.h>

#include "encoding.h"
#include "index.h"
#include "mistakes.h"

namespace ampfuse::checkpoint::detail {

Dict part_of(const torch::nn::Module& model, bool gradients);

void check_part(const torch::nn::Module& model, const at::IValue& part, const Index& index,
                Mistakes& mistakes);

void load_part(torch::nn::Module& model, const Dict& part);

}  // namespace ampfuse::checkpoint::detail
