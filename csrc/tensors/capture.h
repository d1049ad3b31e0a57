// CUDA graphs, seen from code that may be captured in one but knows no CUDA.
#pragma once

namespace ampfuse {

/// Whether a graph is being captured on the current stream. For who has tensors on a GPU: asking
/// makes the GPU ready, if it was never used.
bool is_capturing();

/// How to find out, for the part of the library that has CUDA.
void set_capture_query(bool (*query)());

}  // namespace ampfuse
