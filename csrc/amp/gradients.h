// Inspects an optimizer's gradients: one pass unscales them, finds overflows and computes norms.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace ampfuse::amp {

/// The result of one inspection. Norms and flags are on the devices of the gradients; a flag for
/// all ranks is on the scale's device.
struct Inspection {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::vector<WeakTensor> params;       // weak: a model may be deleted
  std::vector<at::Tensor> norms;        // norm of each parameter's gradient, one tensor per device
  std::vector<at::Tensor> total_norms;  // one per device
  std::vector<at::Tensor> found_infs;   // one per device, or one for all ranks
  bool has_whole_norms = true;          // true if norms cover all ranks, and no gradient is sparse
  bool is_scaled = false;  // true if the norms are those of gradients that are still scaled
};

/// Multiplies the gradients by `inv_scale` in place, measures their norms, and flags non-finite
/// results. With an `inv_scale` of 1 nothing is written. Each device's flag starts with the value
/// of `found_inf`; on the device of `found_inf` the flag is that tensor itself. Throws for fp16
/// gradients, naming the parameter, unless `allow_fp16`. `process_group` is null or was accepted by
/// check_process_group().
Inspection inspect(const torch::optim::Optimizer& optimizer, const at::Tensor& inv_scale,
                   const at::Tensor& found_inf, bool allow_fp16,
                   const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group);

/// The parameters of all groups.
std::vector<at::Tensor> params_of(const torch::optim::Optimizer& optimizer);

/// The dtype in which the norm of these parameters' gradients is returned.
at::ScalarType norm_dtype_of(at::TensorList params);

/// Throws unless `process_group` is null or a c10d::ProcessGroup.
void check_process_group(const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group);

}  // namespace ampfuse::amp
