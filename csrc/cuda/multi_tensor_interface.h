#pragma once

#include <vector>

#include "../math/multi_tensor_norm.h"
#include "../tensors/tensor_run.h"
#include "caller.h"
#include "dtype_numbers.h"

namespace ampfuse {

/// The outputs of multi_tensor_norm. The norms are floats or doubles.
struct NormPointers {
  void* total_norm;
  void* norms;  // one per tensor
  bool are_doubles;
  float* found_inf;
  bool clear_found_inf;  // if false, found_inf is only ever set to 1
  int64_t* first_nonfinite;
  int64_t* nonfinite_count;
};

AMPFUSE_CUDA_API void launch_multi_tensor_norm(CudaCaller& caller,
                                               const std::vector<TensorRun>& runs,
                                               math::NormType type, const NormPointers& outputs);

AMPFUSE_CUDA_API void launch_multi_tensor_unscale(CudaCaller& caller,
                                                  const std::vector<TensorRun>& runs,
                                                  const float* inv_scale, float* found_inf);

AMPFUSE_CUDA_API void launch_multi_tensor_unscale_norm(CudaCaller& caller,
                                                       const std::vector<TensorRun>& runs,
                                                       math::NormType type, const float* inv_scale,
                                                       const NormPointers& outputs);

/// `total_norm`: a float or a double.
AMPFUSE_CUDA_API void launch_multi_tensor_clip(CudaCaller& caller,
                                               const std::vector<TensorRun>& runs,
                                               const void* total_norm, bool is_double,
                                               double max_norm);

}  // namespace ampfuse
