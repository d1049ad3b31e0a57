#pragma once

#include "../ops/multi_tensor_norm.h"
#include "chunks.h"

namespace ampfuse {

/// Joins the partials of the chunks and writes the outputs.
void write_norms(math::NormType type, const Chunks& chunks,
                 const std::vector<math::NormPartial>& partials, const NormOutputs& outputs);

}  // namespace ampfuse
