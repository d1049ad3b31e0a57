#pragma once

#include <ampfuse/export.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace ampfuse {

class GradScaler;
class HostCopy;

/// The kind of master weights that half and bfloat16 parameters have. Other parameters need none.
enum class MasterWeights {
  kAuto,       ///< a float master; the parameter is the master rounded to 16 bits
  kOff,        ///< no master: the parameter loses updates smaller than half its last bit
  kRemainder,  ///< only the 16 bits of the master that a bfloat16 lacks: saves 2 bytes per element
};

/// Prints the name of the kind, for example "kAuto".
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, MasterWeights kind);

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
  /// Dtype of the moments that steps and load() create: kFloat or kBFloat16.
  TORCH_ARG(at::ScalarType, state_dtype) = at::kFloat;
  /// Clips the unscaled gradients as torch::nn::utils::clip_grad_norm_ does. In the options of an
  /// optimizer, this limits the norm over all groups without their own limit. In the options of a
  /// group, it limits the norm of that group (infinity: no clipping).
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Store the unscaled, clipped gradients in grad(). Otherwise a step leaves grad() as it is.
  TORCH_ARG(bool, write_back_grads) = false;

 public:
  /// Reads the entries that the archive has.
  ///
  /// \throws c10::ValueError if these are AdamOptions, and the archive has AdamWOptions.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes all options except `master_weights` and `state_dtype`, which determine how state is
  /// stored, not what is computed.
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

/// State of a parameter from its first step on. Tensors that it does not need are undefined; the
/// others are on the parameter's device. All except `step` have the parameter's shape. Moments have
/// the dtype `state_dtype`, or the parameter's dtype if that is double or complex.
struct AMPFUSE_API AdamParamState : torch::optim::OptimizerCloneableParamState<AdamParamState> {
  /// The number of steps taken, without skipped ones: float, 0-dim.
  TORCH_ARG(at::Tensor, step);
  /// The first moment: the running mean of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The second moment: the running mean of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);
  /// The largest second moment so far, only with amsgrad.
  TORCH_ARG(at::Tensor, max_exp_avg_sq);
  /// The master of a 16-bit parameter: float, or short for a remainder.
  TORCH_ARG(at::Tensor, master_param);

 public:
  /// Reads `step`, which the archive must have, and the other tensors that it has.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes `step` as an integer, as torch does, and the other tensors that are defined.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch's Adam with master weights, and with unscaling and clipping inside the step. A step is one
/// pass over memory: it reads the gradients, writes them only if `write_back_grads` is set, and the
/// host never waits for a GPU.
///
///     ampfuse::AdamW optimizer(model->parameters(),
///                              ampfuse::AdamWOptions(1e-3).weight_decay(0.1).max_grad_norm(1.0));
///
/// Parameters may be half, bfloat16, float, double and complex in any mixture, on any number of
/// devices; a step skips parameters without a gradient. Groups may have options of either class,
/// and may be changed between steps. A group's own options are not merged with the optimizer's:
/// they replace all of them.
///
/// A master is created at its parameter's first step. Between steps a model may be converted from
/// float to half or bfloat16. If it is converted to float or double, the next step throws. If other
/// code writes the parameter later (loading a model, averaging), a float master adopts the written
/// elements. Writes that increase the parameter's version counter or give it other memory are
/// detected, with a warning the first time: write under torch::NoGradGuard, not through data(). Of
/// other writes, a GPU detects those that change 128 adjacent elements, since the step compares one
/// element in 128; a CPU detects all.
///
/// Throws c10::Error before anything is written: for options out of range or of another class, and,
/// with the parameter and its group in the message, for sparse gradients, for gradients of another
/// shape or device and for remainders of half parameters. Also throws the errors of fused_adam.
///
/// One thread at a time may use an optimizer.
class AMPFUSE_API Adam : public torch::optim::Optimizer {
 public:
  /// Makes an optimizer of groups. Groups without options of their own get a copy of `defaults`.
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                AdamOptions defaults = {});
  /// Makes an optimizer of one group.
  explicit Adam(std::vector<at::Tensor> params, AdamOptions defaults = {})
      : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// Adds a group. If it has options, they are used unchanged. Call this function on an
  /// ampfuse::Adam, not on its base class: torch's function of this name is not virtual, does not
  /// check the group, and drops the options in torch 2.15.
  ///
  /// \throws c10::ValueError for options out of range, and for a parameter that is in the optimizer
  ///     already. The group is not added then.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Takes a step.
  ///
  /// \param closure If it is given, it is called before the step, with gradients enabled.
  /// \return The result of the closure, or an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Returns the norm of the last step's unscaled gradients before clipping: a copy, 0-dim, on
  /// their device. Groups that have a limit of their own are not part of it. It is undefined before
  /// the first step, and without a `max_grad_norm`.
  at::Tensor grad_norm() const;

  /// Returns the values that steps update, in the order of the parameters. For a parameter with a
  /// master this is the master, for one with a remainder a new float tensor of the values that it
  /// represents, and otherwise the parameter itself.
  std::vector<at::Tensor> master_params() const;

  /// Resets all masters to their parameters. The bits that the parameters lack are lost.
  void sync_masters_from_model();

  /// Writes the entries that torch::optim::AdamW writes, and further ones; torch::save(optimizer,
  /// file) calls this. torch::optim::AdamW and this class load each other's archives. Parameters
  /// are not saved; remainders are saved as the float masters that they represent.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Loads groups and state, converted to this optimizer's `master_weights` and `state_dtype`;
  /// torch::load(optimizer, file) calls this. Existing tensors of the right dtype are overwritten
  /// in place. If the archive has no masters, the next step creates them from the parameters; if it
  /// has masters, the parameters are set to them, except 16-bit parameters with kOff.
  ///
  /// \throws c10::Error if groups or shapes differ. Nothing is loaded then.
  void load(torch::serialize::InputArchive& archive) override;

  /// Limit of the joint norm of all groups that have no limit of their own. The constructor moves
  /// it here from the defaults. Otherwise torch would copy it to each group without options, as a
  /// limit of that group alone.
  std::optional<double> max_grad_norm;

  /// The loss scale, by which a step divides the gradients: float, one element, on any device. The
  /// code that scales the losses sets it around step(), as GradScaler does. If `found_inf` is not
  /// set, the step itself checks for non-finite gradients.
  std::optional<at::Tensor> grad_scale;
  /// The step is skipped if this is not 0: float, one element, on any device.
  std::optional<at::Tensor> found_inf;

 protected:
  Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
       std::unique_ptr<torch::optim::OptimizerOptions> defaults,
       std::optional<double> max_grad_norm);

 private:
  friend class GradScaler;

  /// Detects writes to parameters with float masters: the number of these parameters, the sum of
  /// their version counters, and a hash of their addresses.
  struct ParamWrites {
    size_t masters = 0;
    int64_t versions = 0;
    uint64_t addresses = 0;

    bool operator==(const ParamWrites& other) const {
      return masters == other.masters && versions == other.versions && addresses == other.addresses;
    }
  };

  ParamWrites param_writes() const;
  void adopt_written_params();
  void warn_of_written_params();
  void for_each_float_master(
      const std::function<void(const at::Tensor& param, const at::Tensor& master)>& visit) const;

  at::Tensor grad_norm_;
  std::vector<uintptr_t> checked_;  // properties of the tensors that the op has accepted
  std::optional<ParamWrites> writes_after_step_;
  std::shared_ptr<HostCopy> written_over_;  // flag: true if other code wrote parameters
  bool warned_ = false;

  /// Norms of all gradients, one per device, during a step of a scaler that has just inspected the
  /// gradients; else empty.
  std::vector<at::Tensor> known_norms_;
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
