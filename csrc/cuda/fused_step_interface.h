#pragma once

#include <vector>

#include "../math/fused_adam.h"
#include "../math/fused_sgd.h"
#include "../ops/step_tensor.h"
#include "caller.h"
#include "dtype_numbers.h"

namespace ampfuse {

/// A number in device memory, float or double; if `data` is null, the number in `value`.
struct StepScalar {
  const void* data;
  bool is_double;
  double value;

  AMPFUSE_HOST_DEVICE double get() const {
    if (data == nullptr) return value;
    return is_double ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
  }
};

/// The arguments of a step besides its tensors and options. The first kernel reads and writes their
/// device memory, so the host does not wait for its values.
struct StepSignals {
  const float* found_inf;   // the step is skipped unless this is 0; may be null
  const float* grad_scale;  // gradients are divided by it; may be null
  StepScalar total_norm;    // norm of the gradients before unscaling
  bool clip;                // true if total_norm is given: gradients are clipped to max_norm
  double max_norm;
  float* grad_norm;  // receives the norm of the unscaled gradients; may be null
  StepScalar lr;
};

/// A step of one optimizer.
template <typename Rule>
struct StepCall {
  const std::vector<StepTensor>& tensors;
  typename Rule::Options rule_options;
  int moments;  // the number of moments in use
  math::StepOptions options;
  StepSignals signals;
};

AMPFUSE_CUDA_API void launch_fused_step(CudaCaller& caller, const StepCall<math::AdamRule>& call);
AMPFUSE_CUDA_API void launch_fused_step(CudaCaller& caller, const StepCall<math::SgdRule>& call);

}  // namespace ampfuse
