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

/// Checked when a scaler is made and whenever its scale moves, not when they are set.
struct AMPFUSE_API GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  TORCH_ARG(bool, enabled) = true;
  /// Where the scale is when it is asked for before anything was scaled; otherwise it is where the
  /// first outputs are. A GPU unless there is none; named, but not there, it disables the scaler.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  TORCH_ARG(std::optional<double>, min_scale) = std::nullopt;  // where backing off ends
  TORCH_ARG(std::optional<double>, max_scale) = std::nullopt;  // where growing ends
  TORCH_ARG(int64_t, hysteresis) = 1;  // the overflow in this place of a row is the first to cost
  /// What starts the row anew: "growth" or "clean_step".
  TORCH_ARG(std::string, hysteresis_refill) = "growth";
  TORCH_ARG(bool, dynamic) = true;  // else the scale stays what it is
  /// update() throws ScaleCollapseError when so many steps in a row were skipped. On a GPU it looks
  /// at what has arrived, so that this may be some steps later, and a row that has ended by then is
  /// not seen.
  TORCH_ARG(std::optional<int64_t>, max_consecutive_skips) = std::nullopt;
  TORCH_ARG(int64_t, history) = 0;  // how many updates history() remembers
  /// Processes that are to skip together, though each sees other gradients.
  /// A c10d::ProcessGroup, whose header takes long to compile.
  TORCH_ARG(c10::intrusive_ptr<c10::intrusive_ptr_target>, process_group) = nullptr;
  TORCH_ARG(bool, allow_fp16_grads) = false;  // half gradients, for optimizers that have masters
  TORCH_ARG(bool, allow_no_grads) = false;    // a step without gradients is no error
};

/// As many steps in a row were skipped as `max_consecutive_skips` says. The scale has moved all the
/// same, and training may go on.
class AMPFUSE_API ScaleCollapseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One update of the scale.
struct ScaleRecord {
  double scale;  ///< that the step was taken with
  bool skipped;  ///< whether gradients were not finite
  double norm;   ///< of all unscaled gradients; NaN where nobody measured it
};

/// torch.amp.GradScaler for C++: scales losses so that 16-bit gradients do not vanish, unscales
/// gradients, skips steps whose gradients are not finite, and moves the scale accordingly.
///
/// With ampfuse::Adam and AdamW nothing here waits for the device; any other torch::optim optimizer
/// is waited for once per step, to decide on the host. Misuse throws in torch's words.
///
///     overflow ──▶ hysteresis left? ──yes──▶ one less of it; the scale stays
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
/// Per optimizer and update: READY ─unscale_()─▶ UNSCALED ─step()─▶ STEPPED ─update()─▶ READY, and
/// from READY step() unscales by itself, or has the optimizer do it.
class AMPFUSE_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;  ///< the other may only be assigned to or destroyed
  GradScaler& operator=(GradScaler&&) noexcept;

  /// The outputs times the scale, which is made on the device of the first.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides the gradients by the scale, for whoever wants to see or change them before the step.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Scales the optimizer's gradients so that their norm is at most `max_norm`, and returns the
  /// norm that they had: 0-dim, on their device, without a wait. Unscales them first, and measures
  /// in the same pass; where unscale_() was called before, it reads them once more. A second pass
  /// writes them only if the norm is above `max_norm`.
  at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);

  /// optimizer.step() on unscaled gradients, or nothing if one of them is not finite; unscales
  /// before, if that was not done. Returns what that returns, or an undefined tensor. A closure is
  /// for disabled scalers alone, and so is LBFGS, which needs one.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Moves the scale as the steps since the last update say, or sets it.
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  double get_scale() const;   ///< 1 when disabled; the host waits for it
  at::Tensor scale_tensor();  ///< the live scale: float, 0-dim; for what takes a `grad_scale`

  bool is_enabled() const;
  const GradScalerOptions& options() const;
  GradScalerOptions& options();  ///< factors, interval, limits and policy may be changed

  at::Tensor step_skipped() const;  ///< whether the last step was: bool, 0-dim, on the device
  bool was_skipped();  ///< the same on the host, which waits if that step is still to come; of
                       ///< several optimizers it is the last one's

  std::vector<ScaleRecord> history() const;  ///< the oldest first, by one copy to the host

  /// Names of the parameters whose gradients were not finite in the last skipped step, of the last
  /// 16 steps: ask when was_skipped(). The host waits for it.
  std::vector<std::string> overflow_report(const torch::nn::Module& model) const;
  std::vector<std::string> overflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters) const;

  /// Python's state dictionary: numbers and words. The history is not part of it.
  c10::impl::GenericDict state_dict() const;

  /// Loads what this class, Python's or torch's saved; what torch's has no entry for stays as it
  /// is. Throws, and loads nothing, for entries that are missing or make no sense.
  void load_state_dict(const c10::impl::GenericDict& state_dict);

  /// The same in archives, which Python reads and writes, too: ampfuse.load_cpp_scaler_state.
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
