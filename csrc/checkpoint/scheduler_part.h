// The part of a learning-rate scheduler in a checkpoint: its count of steps.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

#include "mistakes.h"

namespace ampfuse::checkpoint::detail {

Dict part_of(torch::optim::LRScheduler& scheduler);

void check_part(torch::optim::LRScheduler& scheduler, const at::IValue& part, Mistakes& mistakes);

void load_part(torch::optim::LRScheduler& scheduler, const Dict& part);

}  // namespace ampfuse::checkpoint::detail
