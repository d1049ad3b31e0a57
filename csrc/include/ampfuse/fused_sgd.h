#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// The tensors of a step, all on one device.
///
/// All lists are as long as `params`, except those that may be empty. Entries with the same index
/// have the same shape. Tensors that are written must not share memory, which is checked for
/// `params`, and for `grads` if they are written. Any strides are accepted: a tensor whose memory
/// order differs from its parameter's is copied out and back.
struct FusedSgdTensors {
  at::TensorList params;  ///< half, bfloat16, float or double; written
  at::TensorList grads;   ///< half, bfloat16 or float (double for double parameters)
  /// Float or bfloat16 (double for double parameters); written. Empty without momentum.
  at::TensorList momentum_buffers;
  /// Float, one element: number of steps taken so far; written. At 0 the step starts the momentum:
  /// the buffer is not read and takes the gradient. Empty if there is neither momentum nor
  /// an average nor `round_at_random`.
  at::TensorList state_steps;
  /// Empty, or the masters of 16-bit parameters; written. Masters are float, and each parameter is
  /// its master rounded; or they are remainders of bfloat16 parameters, of dtype short: the 16 bits
  /// of each master that the parameter lacks.
  at::TensorList masters;
  /// Empty, or the units of moments in 8 bits; written. Then `momentum_buffers` is int8. Units are
  /// bfloat16, one for each 32 elements in the order of memory.
  at::TensorList units = {};
  /// Empty, or exponential averages of the parameters, before these are rounded to 16 bits: float
  /// or bfloat16 (double for double parameters); written.
  at::TensorList ema_params = {};
};

/// Options of a step. `lr` must be set; the others have defaults.
struct FusedSgdOptions {
  at::Tensor lr = {};    ///< float or double, one element, on the parameters' device or on the CPU
  double momentum = 0;   ///< decay of momentum_buffers
  double dampening = 0;  ///< gradients enter the buffers multiplied by 1 - dampening
  double weight_decay = 0;        ///< factor of the parameter that is added to the gradient
  bool nesterov = false;          ///< Nesterov's momentum
  bool maximize = false;          ///< step in the direction of the gradient
  bool write_back_grads = false;  ///< store the unscaled, clipped gradients in `grads`
  /// Gradients are divided by it: float, one element. A scale without a finite inverse (0, NaN,
  /// tiny) skips the step.
  std::optional<at::Tensor> grad_scale = std::nullopt;
  /// The step is skipped unless it is 0: float, one element.
  std::optional<at::Tensor> found_inf = std::nullopt;
  /// The norm of the scaled gradients. It must be set if `max_norm` is.
  std::optional<at::Tensor> total_norm = std::nullopt;
  /// Unscaled gradients are clipped to this norm. It must be set if `total_norm` is.
  std::optional<double> max_norm = std::nullopt;
  /// An output: the norm of the unscaled gradients is written here. Float, one element.
  std::optional<at::Tensor> grad_norm = std::nullopt;
  /// Float masters adopt elements that other code wrote, as described in FusedAdamOptions.
  bool adopt_params = false;
  /// Decay of `ema_params`, from 0 to less than 1. The first step sets them to the parameters.
  double ema_decay = 0;
  /// Round 16-bit parameters without a master at random, in proportion, instead of to nearest.
  bool round_at_random = false;
  /// Determines the random numbers, together with step counters and indices of elements. Codes of
  /// 8-bit moments and 16-bit averages are always rounded at random.
  int64_t seed = 0;
  /// The index of each tensor's first element among all elements of the model. Empty: tensors
  /// follow each other, and each begins at a multiple of 8.
  at::IntArrayRef first_indices = {};
};

/// Takes one step of SGD, as defined by torch.optim, in one pass over memory.
///
/// Unscaling, clipping and the decision to skip the step happen on the device in the same pass; the
/// host does not wait. `state_steps` are incremented unless the step is skipped. Arithmetic is in
/// float (double for double parameters). Momentum is never rounded to the parameter's dtype.
///
/// \param tensors See FusedSgdTensors.
/// \param options See FusedSgdOptions.
AMPFUSE_API void fused_sgd(const FusedSgdTensors& tensors, const FusedSgdOptions& options);

}  // namespace ampfuse
