#pragma once

#include <ampfuse/export.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace ampfuse {

class GradScaler;
class HostCopy;

/// What is stepped where a parameter is half or bfloat16. Other parameters need no masters.
enum class MasterWeights {
  kAuto,       ///< a float master, of which the parameter is the nearest 16-bit number
  kOff,        ///< the parameter itself, which loses updates smaller than half its last bit
  kRemainder,  ///< of a master only the 16 bits that a bfloat16 lacks: 2 bytes less per element
};

/// Options of an optimizer or of one of its parameter groups: AdamOptions and AdamWOptions, which
/// also say how the group's weights decay.
///
/// Values are checked when an optimizer is made and at each step, not when they are set.
template <bool kDecoupledWeightDecay>
struct AMPFUSE_API AdamOptionsOf
    : torch::optim::OptimizerCloneableOptions<AdamOptionsOf<kDecoupledWeightDecay>> {
  AdamOptionsOf(double lr = 1e-3) : lr_(lr) {}

  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = kDecoupledWeightDecay ? 1e-2 : 0;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::kAuto;
  TORCH_ARG(at::ScalarType, state_dtype) = at::kFloat;  // of the moments; or at::kBFloat16
  /// Clips the unscaled gradients as torch::nn::utils::clip_grad_norm_ does. In the options that an
  /// optimizer is made with: to a norm over all groups without a limit of their own. In the options
  /// of a group: to the norm of that group (infinity: not at all).
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  TORCH_ARG(bool, write_back_grads) = false;  // leave unscaled, clipped gradients in grad()

 public:
  /// Reads what the archive has; `master_weights` and `state_dtype`, which say how state is kept
  /// and not what is computed, are not part of it. AdamOptions refuse a decoupled decay.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

using AdamOptions = AdamOptionsOf<false>;  ///< weight decay joins the gradient: L2
using AdamWOptions = AdamOptionsOf<true>;  ///< weight decay shrinks the parameter

extern template struct AdamOptionsOf<false>;
extern template struct AdamOptionsOf<true>;

/// What is kept of a parameter from its first step on; undefined is what it does not need. Tensors
/// are on the parameter's device.
struct AMPFUSE_API AdamParamState : torch::optim::OptimizerCloneableParamState<AdamParamState> {
  TORCH_ARG(at::Tensor, step);            // float, 0-dim: steps taken, skipped ones not counted
  TORCH_ARG(at::Tensor, exp_avg);         // of the parameter's shape, as all that follow, in
  TORCH_ARG(at::Tensor, exp_avg_sq);      // state_dtype; of double and complex parameters in
  TORCH_ARG(at::Tensor, max_exp_avg_sq);  // theirs. The last with amsgrad
  TORCH_ARG(at::Tensor, master_param);    // float; short for a remainder

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch's Adam with master weights, unscaling and clipping inside the step, which is one pass over
/// memory: gradients are read, not written unless asked, and the host never waits for a GPU.
///
/// Parameters may be half, bfloat16, float, double and complex in any mixture, on any number of
/// devices; those without a gradient are left alone. Groups may have options of either class, and
/// may be changed between steps: a group's own options are whole, not merged with the optimizer's.
///
/// Masters are made at a parameter's first step. When something else writes a parameter later
/// (loading a model, averaging), its master takes over the elements that were written, with a
/// warning the first time. On a GPU the step compares one element in 128, and so notices every
/// write of 128 adjacent elements; smaller and scattered ones are noticed where they move the
/// parameter's version counter or give it other memory: write under torch::NoGradGuard, not through
/// data().
///
/// Throws c10::Error before anything is written, naming parameter and group, for options out of
/// range or of another class, sparse gradients, gradients of another shape, and remainders of half
/// parameters; and what fused_adam throws.
class AMPFUSE_API Adam : public torch::optim::Optimizer {
 public:
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                AdamOptions defaults = {});
  explicit Adam(std::vector<at::Tensor> params, AdamOptions defaults = {})
      : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// Adds a group, whose options, if it has any, are used as they are. Call it on an ampfuse::Adam:
  /// torch's function of this name is not virtual, and drops the options in torch 2.15.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Calls the closure, if there is one, with gradients enabled, and returns what it returned.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Norm of the last step's unscaled gradients before clipping: 0-dim, on their device, a tensor
  /// of its own. Undefined before the first step and without a `max_grad_norm`.
  at::Tensor grad_norm() const;

  /// The numbers that are stepped, in the order of the parameters: a parameter's float master; of a
  /// remainder the float numbers that it stands for, fresh; else the parameter itself.
  std::vector<at::Tensor> master_params() const;

  /// Makes all masters anew from the parameters, which then have no more bits than these.
  void sync_masters_from_model();

  /// Writes what torch::optim::AdamW writes and more: each class loads the other's archives, and
  /// Python reads and writes them (ampfuse.load_cpp_optimizer_state). Parameters are not part of
  /// it; remainders are saved as the float masters that they stand for.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Loads groups and state, converted to this optimizer's `master_weights` and `state_dtype`,
  /// without moving tensors that are there already. An archive without masters leaves them to be
  /// made from the parameters at the next step; one with masters sets the parameters too. Throws,
  /// and loads nothing, for other groups or shapes.
  void load(torch::serialize::InputArchive& archive) override;

  /// The limit for all groups without their own. The constructor takes it out of its options, so
  /// that groups which get these as their defaults do not have one each.
  std::optional<double> max_grad_norm;

  /// Loss scaling, set by whoever scales losses around step(): gradients are divided by
  /// `grad_scale`; a `found_inf` other than 0 skips the step. With a scale alone the step looks for
  /// gradients that are not finite itself. Float, one element, on any device.
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;

 protected:
  Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
       std::unique_ptr<torch::optim::OptimizerOptions> defaults,
       std::optional<double> max_grad_norm);

 private:
  friend class GradScaler;

  /// What tells whether parameters with float masters were written: how many there are, how often
  /// they were written where version counters show it, and where they lie.
  struct ParamWrites {
    size_t masters = 0;
    int64_t versions = 0;
    uint64_t addresses = 0;

    bool operator==(const ParamWrites&) const = default;
  };

  ParamWrites param_writes() const;
  void adopt_written_params();
  void warn_of_written_params();
  void for_each_master(
      const std::function<void(const at::Tensor& param, const at::Tensor& master)>& visit) const;

  at::Tensor grad_norm_;
  std::vector<const void*> stepped_;  // where the parameters of the last step are
  std::optional<ParamWrites> writes_after_step_;
  std::shared_ptr<HostCopy> written_over_;  // whether anything was, on its way to the host
  bool warned_ = false;

  /// For the duration of a step that a scaler takes: the norms of all gradients, which it has just
  /// measured, one for each device; else empty.
  std::vector<at::Tensor> known_norms_;
};

/// Adam with decoupled weight decay: torch's AdamW.
class AMPFUSE_API AdamW : public Adam {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions defaults = {})
      : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

}  // namespace ampfuse
