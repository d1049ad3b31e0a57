#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// For a tensor that nobody has written yet and that is about to be written whole. Memory that is
/// handed out anew is cleared as it is touched first, a page of 4 KiB at a time, which takes longer
/// than to compute a gradient. Large tensors get pages of 2 MiB, where the system has some; for
/// smaller ones the pages are asked for in advance, many at a time, by all threads. A GPU's is left
/// alone.
void prepare_fresh_memory(const at::Tensor& fresh);

}  // namespace ampfuse
