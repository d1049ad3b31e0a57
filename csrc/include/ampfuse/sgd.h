#pragma once

#include <ampfuse/fused_optimizer.h>

#include <utility>

namespace ampfuse {

/// Options of SGD or of one of its parameter groups.
///
/// Values are checked when an optimizer is constructed and at each step, not when they are set. A
/// schedule may set a learning rate or weight decay below 0 later, as in torch.
struct AMPFUSE_API SGDOptions : torch::optim::OptimizerCloneableOptions<SGDOptions> {
  /// Makes options with a learning rate and the defaults of the others.
  SGDOptions(double lr) : lr_(lr) {}

  /// The learning rate.
  TORCH_ARG(double, lr);
  /// The part of the momentum that a step keeps. With 0 there is no momentum, and no state of it.
  TORCH_ARG(double, momentum) = 0;
  /// The part of a gradient that is not added to the momentum. The first gradient is added whole.
  TORCH_ARG(double, dampening) = 0;
  /// The coefficient of the weight decay, which is added to the gradient (L2).
  TORCH_ARG(double, weight_decay) = 0;
  /// Nesterov's momentum. A new group must have a momentum and no dampening with it.
  TORCH_ARG(bool, nesterov) = false;
  /// Step in the direction of the gradient instead of against it.
  TORCH_ARG(bool, maximize) = false;
  /// The kind of masters of half and bfloat16 parameters that steps and load() create. A parameter
  /// that has a master keeps it.
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::kAuto;
  /// Dtype of the momentum that steps and load() create: kFloat, kBFloat16, or kChar for 8 bits, as
  /// in AdamOptions.
  TORCH_ARG(at::ScalarType, momentum_dtype) = at::kFloat;
  /// Clips the unscaled gradients as torch::nn::utils::clip_grad_norm_ does. In the options of an
  /// optimizer, this limits the norm over all groups without their own limit. In the options of a
  /// group, it limits the norm of that group (infinity: no clipping).
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Store the unscaled, clipped gradients in grad(). Otherwise a step leaves grad() as it is.
  TORCH_ARG(bool, write_back_grads) = false;
  /// The decay of an exponential average of the parameters, for example 0.999, which steps update
  /// from the masters; see averaged().
  TORCH_ARG(std::optional<double>, ema) = std::nullopt;
  /// Dtype of averages: kFloat, or kBFloat16, which is rounded at random.
  TORCH_ARG(at::ScalarType, ema_dtype) = at::kFloat;
  /// Determines the random numbers of kStochastic, of moments in 8 bits and of bfloat16 averages.
  TORCH_ARG(int64_t, seed) = 0;

 public:
  /// Reads the entries that the archive has. Without an archived `ema` the present one stays.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes all options except `master_weights`, `momentum_dtype` and `ema_dtype`, which determine
  /// how state is stored, not what is computed.
  void serialize(torch::serialize::OutputArchive& archive) const override;

  /// Returns the learning rate. torch's schedulers call this.
  double get_lr() const override { return lr(); }
  /// Sets the learning rate. torch's schedulers call this.
  void set_lr(double value) override { lr(value); }
};

/// Returns true if all options are the same.
AMPFUSE_API bool operator==(const SGDOptions& left, const SGDOptions& right);
/// Prints the options that are set, with their names.
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, const SGDOptions& options);

/// State of a parameter with momentum, with a master, with an average, or with kStochastic. Others
/// have none. The momentum has the dtype `momentum_dtype`, or the parameter's dtype if that is
/// double or complex.
struct AMPFUSE_API SGDParamState : FusedParamState {
  /// The momentum: the running sum of gradients. It starts at the first step that is not skipped,
  /// with the gradient of that step. While `step` is 0 its values have no meaning. If it is
  /// switched on when there is an average, it starts from 0, and the first gradient is dampened.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// The units of the momentum, if it is in 8 bits.
  TORCH_ARG(at::Tensor, momentum_buffer_units);

 public:
  using FusedParamState::serialize;
  /// Reads the tensors that the archive has. A momentum without a `step`, as torch saves it, has
  /// started, so its step is 1.
  void serialize(torch::serialize::InputArchive& archive) override;
  Moments moments() override;  ///< See FusedParamState.
  /// Returns false while `step` is 0.
  bool has_started() const override;
  /// Returns a copy that shares the tensors.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
};

/// torch's SGD. The base class describes the step.
///
/// torch::optim::SGD cannot step a parameter whose archived state has no momentum: a 16-bit one
/// with a master, saved before its momentum started. checkpoint::load() leaves such a state out.
///
///     ampfuse::SGD optimizer(model->parameters(),
///                            ampfuse::SGDOptions(0.1).momentum(0.9).nesterov(true));
class AMPFUSE_API SGD : public FusedOptimizer {
 public:
  /// Makes an optimizer of groups. Groups without options of their own get a copy of `defaults`.
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
               SGDOptions defaults);
  /// Makes an optimizer of one group.
  explicit SGD(std::vector<at::Tensor> params, SGDOptions defaults)
      : SGD({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

}  // namespace ampfuse
