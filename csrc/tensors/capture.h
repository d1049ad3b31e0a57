// Detects the capture of CUDA graphs, for code that is compiled without CUDA.
#pragma once

namespace ampfuse {

/// True if a CUDA graph is being captured on the current stream. Call this only if there are
/// tensors on a GPU: the query may initialise CUDA.
bool is_capturing();

/// Sets the query. The callers of CUDA kernels call this.
void set_capture_query(bool (*query)());

}  // namespace ampfuse
