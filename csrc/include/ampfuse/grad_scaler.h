#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ampfuse/export.h>
#include <ampfuse/gate.h>
#include <ampfuse/weak_scaler.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <iosfwd>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ampfuse {

class FusedOptimizer;
class GradScaler;

namespace detail {
/// Returns how many losses were scaled.
AMPFUSE_API int64_t scaled_losses(const GradScaler& scaler);
}  // namespace detail

namespace amp {
struct Inspection;
}  // namespace amp

/// Options of a GradScaler. They are checked by its constructor, update() and load_state_dict(),
/// not when they are set.
struct AMPFUSE_API GradScalerOptions {
  /// The first scale.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// The scale is multiplied by this factor after `growth_interval` steps without overflow. The
  /// constructor requires more than 1, as torch's; later it may be set to 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// The scale is multiplied by this factor when an overflow lowers it.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// The number of steps in a row without overflow after which the scale grows.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// False makes a scaler that changes nothing: scale() returns its argument, and step() calls the
  /// optimizer's.
  TORCH_ARG(bool, enabled) = true;
  /// The device on which scale_tensor() creates the scale; scale() creates it on the device of its
  /// first outputs. The default is a GPU if one is present. CUDA without a GPU disables the scaler.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// Overflows do not lower the scale below this limit.
  TORCH_ARG(std::optional<double>, min_scale) = std::nullopt;
  /// The scale does not grow above this limit.
  TORCH_ARG(std::optional<double>, max_scale) = std::nullopt;
  /// The number of overflows that it takes to lower the scale. Earlier ones only skip their steps.
  /// With 1, every overflow lowers it.
  TORCH_ARG(int64_t, hysteresis) = 1;
  /// The event that restores the hysteresis: "growth" of the scale, or any "clean_step".
  TORCH_ARG(std::string, hysteresis_refill) = "growth";
  /// False keeps the scale constant. Steps that overflow are still skipped.
  TORCH_ARG(bool, dynamic) = true;
  /// update() throws ScaleCollapseError after this many overflows in a row. On a GPU it reads the
  /// last count that has reached the host, so it may throw late, or miss skips that have ended by
  /// then.
  TORCH_ARG(std::optional<int64_t>, max_consecutive_skips) = std::nullopt;
  /// Also skips steps with finite gradients whose norm is an outlier: its logarithm is more than so
  /// many standard deviations above a running mean, for example 6. The first 64 steps are taken.
  /// The scaler may have only one optimizer.
  TORCH_ARG(std::optional<double>, skip_outliers) = std::nullopt;
  /// The number of updates that history() returns.
  TORCH_ARG(int64_t, history) = 0;
  /// The ranks that skip a step together, although their gradients differ. The type must be
  /// c10d::ProcessGroup, whose header is not included because it is slow to compile.
  TORCH_ARG(c10::intrusive_ptr<c10::intrusive_ptr_target>, process_group) = nullptr;
  /// Accept half gradients, for optimizers with masters. ampfuse's optimizers need this only for
  /// unscale_() and clip_grad_norm_().
  TORCH_ARG(bool, allow_fp16_grads) = false;
  /// Accept steps of optimizers whose parameters have no gradients.
  TORCH_ARG(bool, allow_no_grads) = false;

 public:
  /// Sets the device to the one with this name, for example "cuda:0".
  GradScalerOptions& device(const std::string& name) { return device(at::Device(name)); }
};

/// Returns true if all options are the same.
AMPFUSE_API bool operator==(const GradScalerOptions& left, const GradScalerOptions& right);
/// Prints the options that are set, with their names.
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, const GradScalerOptions& options);

/// Thrown by GradScaler::update() after `max_consecutive_skips` overflows in a row. The scale is
/// updated before, so training may continue.
class AMPFUSE_API ScaleCollapseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One update of the scale.
struct ScaleRecord {
  double scale;  ///< the scale of the step
  bool skipped;  ///< true if a gradient was NaN or infinite, or if the norm was an outlier
  double norm;   ///< norm of all unscaled gradients; NaN if it was not measured
};

/// Scales losses so that 16-bit gradients do not vanish, unscales gradients, skips steps whose
/// gradients are not finite, and adjusts the scale, as torch.amp.GradScaler does in Python.
///
///     optimizer.zero_grad();
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// With ampfuse's optimizers the host never waits. With other torch::optim optimizers it waits
/// once per step, to decide whether to call step(). Functions that are called in a wrong order
/// throw c10::Error with torch's messages. Each update changes the scale as follows:
///
///     overflow ──▶ hysteresis tracker above 1? ──yes──▶ it decreases by 1; the scale stays
///                      │ no
///                      └──▶ scale ← max(backoff_factor · scale, min_scale)
///     no overflow ──▶ growth_interval such steps in a row?
///                      │ yes ──▶ scale ← min(growth_factor · scale, max_scale)
///                      └ no ──▶ the scale stays
///
///     hysteresis_refill | hysteresis is restored by | as in
///     ----------------- | ------------------------- | ---------------------------------
///     growth            | growth of the scale       | Megatron-LM, DeepSpeed
///     clean_step        | any step without overflow | apex; DeepSpeed's consecutive_hysteresis
///
/// States of each optimizer: READY ─unscale_()─▶ UNSCALED ─step()─▶ STEPPED ─update()─▶ READY. In
/// the state READY, step() unscales the gradients itself, or the optimizer does. A state belongs to
/// the first parameter of an optimizer, so it remains if the optimizer moves.
///
/// All methods throw c10::Error if the scaler was moved from. One thread at a time may use a scaler
/// and its optimizers.
class AMPFUSE_API GradScaler {
 public:
  /// Makes a scaler.
  ///
  /// \throws c10::Error for options that are out of range or contradict each other.
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();

  /// Loss modules and gates that refer to a scaler go on with the one that it was moved to.
  GradScaler(GradScaler&&) noexcept;
  /// Loss modules and gates that refer to the scaler before the assignment throw from then on.
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Returns the outputs times the scale. The first call creates the scale on their device.
  [[nodiscard]] at::Tensor scale(const at::Tensor& outputs);
  /// Returns each of the outputs times the scale.
  [[nodiscard]] std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides the gradients by the scale in place, to read or change them before step().
  ///
  /// \throws c10::Error if scale() was never called, if this function or step() was called before
  ///     since the last update(), and for half gradients unless `allow_fp16_grads` is set.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the optimizer's gradients, and clips them to a norm of at most `max_norm`. The host
  /// does not wait. One pass unscales and measures the gradients (if unscale_() was called before,
  /// it only reads them); a second pass writes them only if the norm is above `max_norm`. With
  /// ampfuse's optimizers, the option `max_grad_norm` does the same within the step.
  ///
  /// As in torch, `max_norm` is not checked: a negative one reverses the gradients.
  ///
  /// \return The norm before clipping: 0-dim, on the gradients' device.
  at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);

  /// Calls optimizer.step() on unscaled gradients; unscales them first if needed. If a gradient is
  /// not finite, the step is skipped.
  ///
  /// \param optimizer An optimizer of ampfuse, or of torch::optim except LBFGS.
  /// \param closure Must be null, unless the scaler is disabled.
  /// \return The result of optimizer.step(), which is undefined without a closure.
  /// \throws c10::Error if scale() was never called, if step() was called before since the last
  ///     update(), if no parameter has a gradient (not for ampfuse's optimizers, and not with
  ///     `allow_no_grads`), for a closure and for LBFGS, which needs one.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Changes the scale as the steps since the last update require. Call it once after the steps of
  /// all optimizers.
  ///
  /// \throws c10::Error if no optimizer with gradients was stepped or unscaled, unless
  ///     `allow_no_grads` is set.
  /// \throws ScaleCollapseError after `max_consecutive_skips` overflows in a row.
  void update();
  /// Sets the scale, whatever the steps since the last update require.
  void update(double new_scale);
  /// Sets the scale to a tensor of one element that does not require grad. The host does not wait.
  void update(const at::Tensor& new_scale);

  /// Returns the scale, or 1 if the scaler is disabled. The host waits.
  double get_scale() const;
  /// Returns the scale as a tensor that updates change, for `grad_scale` options: float, 0-dim.
  at::Tensor scale_tensor();

  /// Returns true unless the scaler was disabled by its options, or by the lack of a GPU.
  bool is_enabled() const;
  /// Returns the options.
  const GradScalerOptions& options() const;
  /// Returns the options. Factors, interval, limits and `dynamic` may be changed; the next update()
  /// uses them. A changed `hysteresis` is used when the overflows that are left are refilled. Other
  /// options are read by the constructor alone, so changing them has no effect.
  GradScalerOptions& options();

  /// Returns whether the last step was skipped, as a tensor on the device: bool, 0-dim.
  at::Tensor step_skipped() const;
  /// Returns whether the last step was skipped. The host waits for the step.
  bool was_skipped();

  /// Returns a gate that steps a learning rate scheduler only if the step was not skipped.
  [[nodiscard]] Gate gate(std::shared_ptr<torch::optim::LRScheduler> scheduler) const;

  /// Returns the last updates, the oldest one first; at most as many as the option `history`. This
  /// makes one copy to the host, which waits for it.
  [[nodiscard]] std::vector<ScaleRecord> history() const;

  /// Loads the history of another scaler. Call this after its state was loaded, which discards the
  /// present history.
  void load_history(std::vector<ScaleRecord> records);

  /// Returns the names of the parameters with non-finite gradients in the last skipped step. The
  /// scaler remembers 16 steps, so call this when was_skipped() returns true. The host waits.
  [[nodiscard]] std::vector<std::string> overflow_report(const torch::nn::Module& model) const;
  /// Returns the names of those of these parameters that had non-finite gradients in the last
  /// skipped step.
  [[nodiscard]] std::vector<std::string> overflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters) const;

  /// Returns a state dictionary like Python's, made of numbers and strings, without the history. It
  /// is empty if the scaler is disabled.
  [[nodiscard]] c10::impl::GenericDict state_dict() const;

  /// Loads a state dictionary from this class, from the Python class, or from torch's scaler.
  /// Entries that torch does not save are optional: if one is missing, the present value stays.
  ///
  /// \throws c10::Error if other entries are missing, or any are invalid. Nothing is loaded then.
  void load_state_dict(const c10::impl::GenericDict& state_dict);

  /// Saves the state dictionary in an archive; torch::save(scaler, file) calls this.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads the state dictionary from an archive; torch::load(scaler, file) calls this.
  ///
  /// \throws c10::Error in the same cases as load_state_dict(). Nothing is loaded then.
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class WeakScaler;
  friend int64_t detail::scaled_losses(const GradScaler& scaler);

  /// Returns the state. Throws if the scaler was moved from.
  const std::shared_ptr<amp::ScalerState>& checked_state() const;

  at::Tensor step_with_tensors(FusedOptimizer& optimizer, const amp::Inspection& inspection,
                               const at::Tensor& found_inf);

  std::shared_ptr<amp::ScalerState> state_;
};

/// Prints the options, and whether the scaler is enabled. The host does not wait for the scale.
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, const GradScaler& scaler);

/// Calls GradScaler::save(), for torch::save.
AMPFUSE_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
/// Calls GradScaler::load(), for torch::load.
AMPFUSE_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace ampfuse
