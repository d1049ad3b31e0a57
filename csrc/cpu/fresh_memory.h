#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Prepares the memory of a tensor that was just allocated and is about to be written completely.
/// The system clears new memory at the first access, one page of 4 KiB at a time, which takes
/// longer than computing a gradient. Large tensors get pages of 2 MiB, if the system has some. For
/// tensors that fit the cache, all threads request the pages in advance, many at a time. Does
/// nothing for tensors of less than 256 KiB, or on a GPU.
void prepare_fresh_memory(const at::Tensor& fresh);

}  // namespace ampfuse
