// One read of an optimizer's gradients, wherever they are: unscaled, looked through, measured.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace ampfuse::amp {

/// What one look at an optimizer's gradients told; all on the devices of the gradients.
struct Inspection {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::vector<WeakTensor> params;       // which a model may take with it
  std::vector<at::Tensor> norms;        // of the parameters' gradients, one tensor per device
  std::vector<at::Tensor> total_norms;  // one per device
  std::vector<at::Tensor> found_infs;   // one per device, or one for all processes
  bool are_whole = true;                // whether the norms are of all of all gradients
  bool is_scaled = false;               // whether these are scaled still
};

/// Multiplies by `inv_scale`, and tells whether a result is not finite. At 1 nothing is written.
/// Flags begin as `found_inf`, which becomes that of its device. Refuses half gradients, naming the
/// parameter, unless they are allowed. `process_group`: null, or one that check_process_group has
/// let pass.
Inspection inspect(const torch::optim::Optimizer& optimizer, const at::Tensor& inv_scale,
                   const at::Tensor& found_inf, bool allow_fp16,
                   const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group);

/// The parameters of all groups.
std::vector<at::Tensor> params_of(const torch::optim::Optimizer& optimizer);

/// The dtype in which the norm of these parameters' gradients is returned.
at::ScalarType norm_dtype_of(at::TensorList params);

/// Refuses what is none.
void check_process_group(const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group);

}  // namespace ampfuse::amp
