// The state of a GradScaler.
#pragma once

#include "gradients.h"
#include "mistakes.h"
#include "scaler_history.h"

namespace ampfuse::amp {

enum class Stage { kReady, kUnscaled, kStepped };

/// An optimizer that was unscaled or stepped since the last update.
struct OptimizerState {
  at::Tensor first_param;  // identifies the optimizer, whose address changes if it moves
  const void* address;     // identifies an optimizer without parameters
  Stage stage = Stage::kReady;
  Inspection inspection = {};
  UnscaledGradient unscaled = {};
  bool is_loaded = false;  // the scaler has loaded a state since it was unscaled
};

class ScalerState {
 public:
  explicit ScalerState(GradScalerOptions options);

  OptimizerState& of(const torch::optim::Optimizer& optimizer);

  /// Like of(), but gradients that were computed after a load count as scaled, whatever was
  /// unscaled before it.
  OptimizerState& current(const torch::optim::Optimizer& optimizer);

  void note_scaled_loss(const at::Tensor& loss, const at::Tensor& product);

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
  Watch watch;

 private:
  double first_scale_;
  int64_t first_growth_tracker_ = 0;
};

}  // namespace ampfuse::amp
