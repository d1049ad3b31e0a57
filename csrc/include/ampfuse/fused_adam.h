#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// The tensors of a step, all on one device. All lists are as long as `params`, except those that
/// may be empty; entries with the same index have the same shape. Tensors that are written must not
/// share memory, which is checked for `params`, and for `grads` if they are written. Any strides
/// are accepted: a tensor whose memory order differs from its parameter's is copied out and back.
struct FusedAdamTensors {
  at::TensorList params;           ///< half, bfloat16, float or double; written
  at::TensorList grads;            ///< half, bfloat16 or float (double for double parameters)
  at::TensorList exp_avgs;         ///< float or bfloat16 (double for double parameters); written
  at::TensorList exp_avg_sqs;      ///< like exp_avgs
  at::TensorList max_exp_avg_sqs;  ///< like exp_avgs with amsgrad, else empty
  at::TensorList state_steps;      ///< float, one element: number of steps taken so far; written
  /// Empty; or the float masters of 16-bit parameters, each of which equals its master rounded; or
  /// the remainders of bfloat16 parameters, of dtype short: the 16 bits of each master that the
  /// parameter lacks. Written.
  at::TensorList masters;
};

struct FusedAdamOptions {
  at::Tensor lr;  ///< float or double, one element, on the parameters' device or on the CPU
  double beta1 = 0.9;
  double beta2 = 0.999;
  double weight_decay = 0;
  double eps = 1e-8;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = false;  ///< true: as in AdamW; false: Adam's L2 term
  bool write_back_grads = false;        ///< store the unscaled, clipped gradients in `grads`
  /// Gradients are divided by it: float, one element. A scale without a finite inverse (0, NaN,
  /// tiny) skips the step.
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;   ///< the step is skipped unless it is 0: float, one element
  std::optional<at::Tensor> total_norm;  ///< norm of the scaled gradients; requires max_norm
  std::optional<double> max_norm;  ///< unscaled gradients are clipped to it; requires total_norm
  std::optional<at::Tensor> grad_norm;  ///< output: the unscaled norm; float, one element
  /// Before the step, float masters adopt the elements that other code wrote into their parameters.
  /// Such an element differs from its rounded master. A GPU first compares one element in 128, and
  /// the last one of every chunk of 2048. If one of these differs, it compares the whole chunk.
  bool adopt_params = false;
};

/// Takes one step of Adam or AdamW, as defined by torch.optim, in one pass over memory. Unscaling,
/// clipping and the decision to skip the step are part of it and happen on the device; the host
/// does not wait. `state_steps` are incremented unless the step is skipped.
///
/// Arithmetic is in float (double for double parameters). Moments are never rounded to the
/// parameter's dtype.
AMPFUSE_API void fused_adam(const FusedAdamTensors& tensors, const FusedAdamOptions& options);

}  // namespace ampfuse
