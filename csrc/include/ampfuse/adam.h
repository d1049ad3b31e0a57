#pragma once

#include <ampfuse/fused_optimizer.h>

#include <tuple>
#include <utility>

namespace ampfuse {

/// Options of an optimizer or of one of its parameter groups. The class, AdamOptions or
/// AdamWOptions, determines the kind of weight decay.
///
/// Values are checked when an optimizer is constructed and at each step, not when they are set. A
/// schedule may set a learning rate or weight decay below 0 later, as in torch.
template <bool kDecoupledWeightDecay>
struct AMPFUSE_API AdamOptionsOf
    : torch::optim::OptimizerCloneableOptions<AdamOptionsOf<kDecoupledWeightDecay>> {
  /// Makes options with a learning rate and the defaults of the others.
  AdamOptionsOf(double lr = 1e-3) : lr_(lr) {}

  using betas_t = std::tuple<double, double>;  ///< beta1 and beta2
  /// The learning rate.
  TORCH_ARG(double, lr);
  /// The decay of the first and of the second moment, from 0 to less than 1.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// This number is added to the denominator of an update, so that it is not 0.
  TORCH_ARG(double, eps) = 1e-8;
  /// The coefficient of the weight decay: 0.01 by default in AdamWOptions, 0 in AdamOptions.
  TORCH_ARG(double, weight_decay) = kDecoupledWeightDecay ? 1e-2 : 0;
  /// Divide by the largest second moment so far instead of the present one.
  TORCH_ARG(bool, amsgrad) = false;
  /// Step in the direction of the gradient instead of against it.
  TORCH_ARG(bool, maximize) = false;
  /// The kind of masters of half and bfloat16 parameters that steps and load() create. A parameter
  /// that has a master keeps it.
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::kAuto;
  /// Dtype of the moments that steps and load() create: kFloat, kBFloat16, or kChar for 8 bits:
  /// codes of the moments' square roots, and a bfloat16 unit for each 32 of them.
  TORCH_ARG(at::ScalarType, state_dtype) = at::kFloat;
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
  ///
  /// \throws c10::ValueError if these are AdamOptions, and the archive has AdamWOptions.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes all options except `master_weights`, `state_dtype` and `ema_dtype`, which determine how
  /// state is stored, not what is computed.
  void serialize(torch::serialize::OutputArchive& archive) const override;

  /// Returns the learning rate. torch's schedulers call this.
  double get_lr() const override { return lr(); }
  /// Sets the learning rate. torch's schedulers call this.
  void set_lr(double value) override { lr(value); }
};

using AdamOptions = AdamOptionsOf<false>;  ///< weight decay is added to the gradient (L2)
using AdamWOptions = AdamOptionsOf<true>;  ///< weight decay shrinks the parameter directly

/// Returns true if all options are the same.
template <bool kDecoupledWeightDecay>
AMPFUSE_API bool operator==(const AdamOptionsOf<kDecoupledWeightDecay>& left,
                            const AdamOptionsOf<kDecoupledWeightDecay>& right);
/// Prints the options that are set, with their names.
template <bool kDecoupledWeightDecay>
AMPFUSE_API std::ostream& operator<<(std::ostream& stream,
                                     const AdamOptionsOf<kDecoupledWeightDecay>& options);

extern template struct AdamOptionsOf<false>;
extern template struct AdamOptionsOf<true>;

/// State of a parameter. Moments have the dtype `state_dtype`, or the parameter's dtype if that is
/// double or complex. In 8 bits, first moments are kChar and second moments kByte.
struct AMPFUSE_API AdamParamState : FusedParamState {
  /// The first moment: the running mean of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The second moment: the running mean of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);
  /// The largest second moment so far, only with amsgrad.
  TORCH_ARG(at::Tensor, max_exp_avg_sq);
  /// The units of exp_avg, if it is in 8 bits.
  TORCH_ARG(at::Tensor, exp_avg_units);
  /// The units of exp_avg_sq, if it is in 8 bits.
  TORCH_ARG(at::Tensor, exp_avg_sq_units);

 public:
  using FusedParamState::serialize;
  /// Reads `step`, which the archive must have, and the other tensors that it has.
  void serialize(torch::serialize::InputArchive& archive) override;
  Moments moments() override;  ///< See FusedParamState.
  /// Returns a copy that shares the tensors.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
};

/// torch's Adam. Groups may have options of either class. The base class describes the step.
///
///     ampfuse::AdamW optimizer(model->parameters(),
///                              ampfuse::AdamWOptions(1e-3).weight_decay(0.1).max_grad_norm(1.0));
class AMPFUSE_API Adam : public FusedOptimizer {
 public:
  /// Makes an optimizer of groups. Groups without options of their own get a copy of `defaults`.
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                AdamOptions defaults = {});
  /// Makes an optimizer of one group.
  explicit Adam(std::vector<at::Tensor> params, AdamOptions defaults = {})
      : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

 protected:
  /// Makes an optimizer whose defaults may be AdamWOptions. They have no `max_grad_norm`.
  Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
       std::unique_ptr<torch::optim::OptimizerOptions> defaults,
       std::optional<double> max_grad_norm);
};

/// Adam with decoupled weight decay: torch's AdamW.
class AMPFUSE_API AdamW : public Adam {
 public:
  /// Makes an optimizer of groups. Groups without options of their own get a copy of `defaults`.
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 AdamWOptions defaults = {});
  /// Makes an optimizer of one group.
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions defaults = {})
      : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

}  // namespace ampfuse
