#pragma once

#include <ampfuse/export.h>
#include <c10/util/SmallVector.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ampfuse {

class GradScaler;
class HostCopy;
class OptimizerRule;

/// Restores parameters, which FusedOptimizer::averaged() has made their averages, when it is
/// destroyed. It may outlive the optimizer.
class AMPFUSE_API AveragedParams {
 public:
  /// Moves the duty to restore the parameters.
  AveragedParams(AveragedParams&& other) noexcept = default;
  AveragedParams& operator=(AveragedParams&&) = delete;  ///< not assignable
  /// Restores the parameters. Warns of those that have been replaced by others of another shape.
  ~AveragedParams();

 private:
  friend class FusedOptimizer;

  struct Swapped {
    at::Tensor param;
    at::Tensor own;  // its value before
  };

  AveragedParams(std::vector<Swapped> swapped, std::shared_ptr<bool> is_averaged)
      : swapped_(std::move(swapped)), is_averaged_(std::move(is_averaged)) {}

  std::vector<Swapped> swapped_;       // empty if this was moved from
  std::shared_ptr<bool> is_averaged_;  // the optimizer's
};

/// The kind of master weights that half and bfloat16 parameters have. Other parameters need none.
enum class MasterWeights {
  kAuto,        ///< a float master; the parameter is the master rounded to 16 bits
  kOff,         ///< no master: the parameter loses updates smaller than half its last bit
  kRemainder,   ///< only the 16 bits of the master that a bfloat16 lacks: saves 2 bytes per element
  kStochastic,  ///< no master: the parameter is rounded up or down at random, in proportion
};

/// Prints the name of the kind, for example "kAuto".
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, MasterWeights kind);

/// State of a parameter from its first step on. Tensors that it does not need are undefined; the
/// others are on the parameter's device. All except `step` and units have the parameter's shape.
struct AMPFUSE_API FusedParamState : torch::optim::OptimizerParamState {
  /// The number of steps since the moments began, or before them an average or rounding at random.
  /// Skipped steps do not count. Float, 0-dim.
  TORCH_ARG(at::Tensor, step);
  /// The master of a 16-bit parameter: float, or short for a remainder.
  TORCH_ARG(at::Tensor, master_param);
  /// The exponential average of the parameter, or of its master.
  TORCH_ARG(at::Tensor, ema_param);

 public:
  /// A moment, and its names in archives.
  struct Moment {
    const char* name;    ///< for example "exp_avg"
    at::Tensor& tensor;  ///< undefined if no step has needed it; codes of 8 bits if it has units
    at::Tensor* units;   ///< a bfloat16 for each 32 codes; null if the moment has no 8-bit form

    /// Returns true if `tensor` has codes of 8 bits.
    bool has_codes() const { return units && units->defined(); }
    /// Returns the name of `tensor` in archives.
    std::string tensor_name() const { return has_codes() ? std::string(name) + "_codes" : name; }
    /// Returns the name of `units` in archives.
    std::string units_name() const { return std::string(name) + "_units"; }
  };
  using Moments = c10::SmallVector<Moment, 3>;  ///< a list on the stack
  /// Returns the moments that a parameter may have, always in the same order.
  virtual Moments moments() = 0;
  /// Returns false if the moments hold no gradient yet. They are not saved then. The host waits
  /// for a GPU if this depends on `step`.
  virtual bool has_started() const { return true; }

  /// Reads the tensors that the archive has.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes `step` as an integer, as torch does, and the other tensors that are defined.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// The base class of ampfuse's optimizers: those of torch with master weights, and with unscaling
/// and clipping inside the step. A step is one pass over memory: it reads the gradients, writes
/// them only if `write_back_grads` is set, and the host never waits for a GPU.
///
/// Parameters may be half, bfloat16, float, double and complex in any mixture, on any number of
/// devices; a step skips parameters without a gradient. The options of groups may be changed
/// between steps. A group's own options are not merged with the optimizer's: they replace all of
/// them.
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
/// shape or device and for remainders of half parameters. Also throws the errors of the operator
/// that takes the step.
///
/// One thread at a time may use an optimizer.
class AMPFUSE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  /// Adds a group. If it has options, they are used unchanged. Call this function on an optimizer
  /// of ampfuse, not on its base class: torch's function of this name is not virtual, leaves the
  /// checks to the next step, and drops the options in torch 2.15.
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
  [[nodiscard]] at::Tensor grad_norm() const;

  /// Returns the values that steps update, in the order of the parameters. For a parameter with a
  /// master this is the master, for one with a remainder a new float tensor of the values that it
  /// represents, and otherwise the parameter itself.
  ///
  /// \throws c10::Error while the parameters are averages.
  [[nodiscard]] std::vector<at::Tensor> master_params() const;

  /// Makes the parameters their exponential averages as long as the result lives, for example to
  /// evaluate. Parameters without an average keep their values. Do not step, save or load the
  /// optimizer meanwhile, or read its masters.
  ///
  /// \throws c10::Error if there are no averages, or if the parameters are averages already.
  [[nodiscard]] AveragedParams averaged();

  /// Makes all masters adopt what other code has written to their parameters. Elements that were
  /// not written keep the additional bits of their masters. A remainder stays as it is: the
  /// parameter is the other half of its master.
  void sync_masters_from_model();

  /// Writes the entries that torch's optimizer of the same name writes, and further ones;
  /// torch::save(optimizer, file) calls this. The two classes load each other's archives.
  /// Parameters are not saved; remainders are saved as the float masters that they represent.
  /// Moments in 8 bits are saved as they are, which torch's optimizer cannot load.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Loads groups and state, converted to this optimizer's kind of masters and dtype of moments;
  /// torch::load(optimizer, file) calls this. Existing tensors of the right dtype are overwritten
  /// in place. If the archive has no masters, the next step creates them from the parameters; if it
  /// has masters, the parameters are set to them, except 16-bit parameters with kOff or
  /// kStochastic. An archive without `ema` keeps that of the groups.
  ///
  /// \throws c10::Error if groups or shapes differ, and for an archive of another optimizer.
  ///     Nothing is loaded then.
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
  /// The defaults have no `max_grad_norm`, since the optimizer has it.
  FusedOptimizer(const OptimizerRule& rule,
                 const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
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

  /// A gradient that is still multiplied by the loss scale after a scaler's step.
  struct ScaledGradient {
    at::Tensor param;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> grad;
    uint32_t version;
  };

  void check_repeats();
  std::optional<ScaledGradient> first_gradient() const;
  void warn_of_scaled_gradient();
  ParamWrites param_writes() const;
  void adopt_written_params();
  void warn_of_written_params();
  void for_each_float_master(
      const std::function<void(const at::Tensor& param, const at::Tensor& master)>& visit) const;

  void refuse_averaged(const char* method) const;

  const OptimizerRule* rule_;  // what differs between the optimizers
  size_t params_checked_ = 0;  // number of parameters that were checked for repeats
  at::Tensor grad_norm_;
  std::vector<uintptr_t> checked_;  // properties of the tensors that the op has accepted
  std::optional<ParamWrites> writes_after_step_;
  std::shared_ptr<HostCopy> written_over_;  // flag: true if other code wrote parameters
  bool warned_ = false;
  std::shared_ptr<bool> is_averaged_ = std::make_shared<bool>(false);
  std::optional<ScaledGradient> stepped_with_;  // the first gradient of a scaler's last step

  /// Norms of all gradients, one per device, during a step of a scaler that has just inspected the
  /// gradients; else empty.
  std::vector<at::Tensor> known_norms_;
};

}  // namespace ampfuse
