// The state of a GradScaler.
#pragma once

#include "gradients.h"
#include "scaler_history.h"

namespace ampfuse::amp {

enum class Stage { kReady, kUnscaled, kStepped };

/// An optimizer that was unscaled or stepped since the last update.
struct OptimizerState {
  at::Tensor first_param;  // identifies the optimizer, whose address changes if it moves
  const void* address;     // identifies an optimizer without parameters
  Stage stage = Stage::kReady;
  Inspection inspection = {};
  /// Records the first parameter whose gradient was unscaled.
  void note_unscaled(const torch::optim::Optimizer& optimizer);

  /// Returns true if gradients were reset and computed again since they were unscaled.
  bool has_new_gradients() const { return is_stale && unscaled.grad().defined(); }

  at::Tensor unscaled = {};  // the first parameter whose gradient was unscaled
  bool is_stale = false;     // its gradient was reset since, and a loss was scaled
  bool is_loaded = false;    // the scaler has loaded a state since
};

class ScalerState {
 public:
  explicit ScalerState(GradScalerOptions options);

  OptimizerState& of(const torch::optim::Optimizer& optimizer);

  /// Like of(), but gradients that were computed after a load count as scaled, whatever was
  /// unscaled before it.
  OptimizerState& current(const torch::optim::Optimizer& optimizer);

  void note_scaled_loss();

  /// Returns the device of the scale if scale_tensor() is called before scale() has seen a tensor.
  at::Device first_device() const;

  /// Returns the scale; creates it on `device` if it does not exist yet.
  const at::Tensor& scale_on(at::Device device);

  /// Forgets what was done since the last update.
  void end_step();

  double host_scale() const;
  int64_t host_growth_tracker() const;

  /// Sets the scale and the growth tracker, in place if they are on a device already.
  void set_scale(double scale, int64_t growth_tracker);

  /// Returns the norm of the unscaled gradients of all optimizers, as inspected before their steps,
  /// or nullopt if it is not known.
  std::optional<at::Tensor> unscaled_norm() const;

  GradScalerOptions options;
  bool enabled;
  at::Tensor scale;  // undefined until scale_on(), like growth_tracker
  at::Tensor growth_tracker;
  ScalerHistory history;
  std::vector<OptimizerState> optimizers;
  bool has_announced = false;  // a loss module has asked for the scale since the last update
  bool has_scaled = false;     // a loss was scaled since then
  bool is_known = false;       // the program knows the scale, so it may multiply by it
  int64_t losses = 0;          // number of losses that were scaled

 private:
  double first_scale_;
  int64_t first_growth_tracker_ = 0;
};

}  // namespace ampfuse::amp
