#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// The tensors of a step, on one device; all lists are as long as `params`, or empty where it says
/// so, and entries with the same index have the same shape. What is written may share no memory,
/// which is checked of `params` and, where they are written, of `grads`. Strides are free: tensors
/// that lie in memory in another order than their parameter are copied to and fro.
struct FusedAdamTensors {
  at::TensorList params;           ///< half, bfloat16, float or double; written
  at::TensorList grads;            ///< any of these whatever the parameter's, but double to double
  at::TensorList exp_avgs;         ///< float or bfloat16 (double); written
  at::TensorList exp_avg_sqs;      ///< likewise
  at::TensorList max_exp_avg_sqs;  ///< likewise with amsgrad, else empty
  at::TensorList state_steps;      ///< float, one element: steps taken so far; written
  at::TensorList masters;  ///< empty, or for 16-bit parameters the numbers that are stepped, of
                           ///< which `params` are copies: float; or for bfloat16 parameters the 16
                           ///< bits that these lack, short. Written
};

struct FusedAdamOptions {
  at::Tensor lr;  ///< float or double, one element, on the parameters' device or on the CPU
  double beta1 = 0.9;
  double beta2 = 0.999;
  double weight_decay = 0;
  double eps = 1e-8;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = false;   ///< AdamW's, else Adam's L2
  bool write_back_grads = false;         ///< leave the unscaled, clipped gradients in `grads`
  std::optional<at::Tensor> grad_scale;  ///< gradients are divided by it: float, one element
  std::optional<at::Tensor> found_inf;   ///< unless it is 0 nothing is done: float, one element
  std::optional<at::Tensor> total_norm;  ///< norm of the gradients as they come, still scaled;
  std::optional<double> max_norm;        ///< clips the unscaled gradients to this. Both or neither
  std::optional<at::Tensor> grad_norm;   ///< receives the unscaled norm: float, one element
  /// Before they are stepped, float masters become what their parameters are, in those elements in
  /// which a parameter is not its master rounded, because somebody else wrote it. On a GPU one
  /// element in 128 and the last one of each 2048 are compared, and where one was written all of
  /// its 2048 are.
  bool adopt_params = false;
};

/// One step of Adam or AdamW, as torch.optim has it, in one pass over memory: unscaling, clipping
/// and the decision to skip are part of it, are made on the device, and no host waits. Steps are
/// counted here, when they are taken.
///
/// Arithmetic is in float (double for double). Moments are never rounded to the parameter's dtype.
AMPFUSE_API void fused_adam(const FusedAdamTensors& tensors, const FusedAdamOptions& options);

}  // namespace ampfuse
