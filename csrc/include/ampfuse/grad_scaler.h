#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ampfuse/export.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ampfuse {

class Adam;

namespace amp {
class ScalerState;
struct Inspection;
}  // namespace amp

/// Options are checked by the constructor, update() and load_state_dict(), not when they are set.
struct AMPFUSE_API GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  TORCH_ARG(bool, enabled) = true;
  /// The device on which scale_tensor() creates the scale; scale() creates it on the device of its
  /// first outputs. The default is a GPU if one is present. CUDA without a GPU disables the scaler.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  TORCH_ARG(std::optional<double>, min_scale) = std::nullopt;  // lower limit of backing off
  TORCH_ARG(std::optional<double>, max_scale) = std::nullopt;  // upper limit of growth
  /// The number of overflows after which the scale is lowered. Earlier ones only skip their steps.
  TORCH_ARG(int64_t, hysteresis) = 1;
  /// The event that restores the hysteresis: "growth" of the scale, or any "clean_step".
  TORCH_ARG(std::string, hysteresis_refill) = "growth";
  TORCH_ARG(bool, dynamic) = true;  // false: the scale never changes
  /// update() throws ScaleCollapseError after this many skips in a row. On a GPU it reads the last
  /// count that has reached the host, so it may throw late, or miss skips that have ended by then.
  TORCH_ARG(std::optional<int64_t>, max_consecutive_skips) = std::nullopt;
  /// Also skips steps with finite gradients whose norm is an outlier: its logarithm is more than so
  /// many standard deviations above a running mean, for example 6. The first 64 steps are taken.
  /// There may be one optimizer.
  TORCH_ARG(std::optional<double>, skip_outliers) = std::nullopt;
  TORCH_ARG(int64_t, history) = 0;  // number of updates that history() returns
  /// The ranks that skip a step together, although their gradients differ. The type must be
  /// c10d::ProcessGroup, whose header is not included because it is slow to compile.
  TORCH_ARG(c10::intrusive_ptr<c10::intrusive_ptr_target>, process_group) = nullptr;
  TORCH_ARG(bool, allow_fp16_grads) = false;  // accept half gradients, for optimizers with masters
  TORCH_ARG(bool, allow_no_grads) = false;    // accept steps without gradients
};

/// Thrown after `max_consecutive_skips` skips in a row. The scale is updated before, so
/// training may continue.
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

/// torch.amp.GradScaler for C++: scales losses so that 16-bit gradients do not vanish, unscales
/// gradients, skips steps whose gradients are not finite, and adjusts the scale.
///
/// With ampfuse::Adam and AdamW the host never waits. With other torch::optim optimizers it waits
/// once per step, to decide whether to call step(). Misuse throws with torch's messages.
///
///     overflow ──▶ hysteresis left? ──yes──▶ hysteresis decreases by 1; the scale stays
///                      │ no
///                      └──▶ scale ← max(backoff_factor · scale, min_scale)
///     no overflow ──▶ growth_interval of them in a row?
///                      │ yes ──▶ scale ← min(growth_factor · scale, max_scale)
///                      └ no ──▶ the scale stays
///
///     hysteresis_refill | hysteresis is restored by | as in
///     ----------------- | ------------------------- | ---------------------------------
///     growth            | growth of the scale       | Megatron-LM, DeepSpeed
///     clean_step        | any step that is taken    | apex; DeepSpeed's consecutive_hysteresis
///
/// Per optimizer and update: READY ─unscale_()─▶ UNSCALED ─step()─▶ STEPPED ─update()─▶ READY. From
/// READY, step() unscales by itself, or has the optimizer do it.
class AMPFUSE_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;  ///< a moved-from scaler may only be assigned to or destroyed
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Returns the outputs times the scale. The first call creates the scale on their device.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides the gradients by the scale in place, to read or change them before step().
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Clips the optimizer's gradients to a norm of at most `max_norm`, and returns their norm before
  /// clipping: 0-dim, on their device. The host does not wait. One pass unscales and measures the
  /// gradients (if unscale_() was called before, it only reads them); a second pass writes them
  /// only if the norm is above `max_norm`.
  at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);

  /// Calls optimizer.step() on unscaled gradients and returns its result; unscales them first if
  /// needed. If a gradient is not finite, skips the step and returns an undefined tensor. Throws
  /// c10::Error for a closure, and for LBFGS, which needs one, unless the scaler is disabled.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Changes the scale as the steps since the last update require, or sets it.
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  double get_scale() const;   ///< the host waits; returns 1 if disabled
  at::Tensor scale_tensor();  ///< the live scale, for `grad_scale` options: float, 0-dim

  bool is_enabled() const;
  const GradScalerOptions& options() const;
  GradScalerOptions& options();  ///< factors, interval, limits and policy may be changed

  at::Tensor step_skipped() const;  ///< bool, 0-dim, on the device: the last step was skipped
  bool was_skipped();               ///< the same as a bool; the host waits for the step

  std::vector<ScaleRecord> history() const;  ///< oldest first; makes one copy to the host

  /// Puts records of another scaler, whose state was loaded before, in front of those to come.
  void load_history(std::vector<ScaleRecord> records);

  /// Names of the parameters with non-finite gradients in the last skipped step. The scaler
  /// remembers 16 steps, so call this when was_skipped(). The host waits.
  std::vector<std::string> overflow_report(const torch::nn::Module& model) const;
  std::vector<std::string> overflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters) const;

  /// Returns a state dictionary like Python's, made of numbers and strings, without the history. It
  /// is empty if the scaler is disabled.
  c10::impl::GenericDict state_dict() const;

  /// Loads a state dictionary of this class, of the Python class or of torch's. Entries that
  /// torch's lacks keep their values. If other entries are missing or any are invalid, throws
  /// c10::Error and loads nothing.
  void load_state_dict(const c10::impl::GenericDict& state_dict);

  /// Saves and loads the same state in archives. Python reads and writes them, too
  /// (ampfuse.load_cpp_scaler_state).
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  at::Tensor step_with_tensors(Adam& optimizer, const amp::Inspection& inspection,
                               const at::Tensor& found_inf);

  std::unique_ptr<amp::ScalerState> state_;
};

/// For torch::save and torch::load.
AMPFUSE_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
AMPFUSE_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace ampfuse
