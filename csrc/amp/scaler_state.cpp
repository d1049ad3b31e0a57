#include "scaler_state.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ampfuse/multi_tensor_norm.h>

#include "../tensors/device_scalars.h"
#include "scale_policy.h"

namespace ampfuse::amp {

namespace {

bool can_be_enabled(const GradScalerOptions& options) {
  if (!options.enabled()) return false;
  if (!options.device() || !options.device()->is_cuda() || at::hasCUDA()) return true;
  TORCH_WARN("GradScaler is enabled, but CUDA is not available.  Disabling.");
  return false;
}

at::Tensor first_param_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) return group.params()[0];
  }
  return {};
}

}  // namespace

ScalerState::ScalerState(GradScalerOptions given)
    : options(std::move(given)),
      enabled(can_be_enabled(options)),
      history({options.hysteresis(), 0, 0}, options.history()),
      first_scale_(options.init_scale()) {
  if (!enabled) return;
  check_initial_options(options);
  check_process_group(options.process_group());
}

OptimizerState& ScalerState::of(const torch::optim::Optimizer& optimizer) {
  const at::Tensor first_param = first_param_of(optimizer);
  for (OptimizerState& known : optimizers) {
    if (first_param.defined() ? known.first_param.is_same(first_param)
                              : known.address == &optimizer) {
      return known;
    }
  }
  optimizers.push_back({first_param, &optimizer});
  return optimizers.back();
}

OptimizerState& ScalerState::current(const torch::optim::Optimizer& optimizer) {
  OptimizerState& found = of(optimizer);
  if (found.is_loaded && found.unscaled.was_reset()) found = {found.first_param, found.address};
  return found;
}

void ScalerState::note_scaled_loss(const at::Tensor& loss, const at::Tensor& product) {
  has_scaled = true;
  watch.note_scaled_loss(loss, product);
  for (OptimizerState& known : optimizers) {
    if (known.stage != Stage::kUnscaled) continue;
    known.unscaled.note_scaled_loss(product, watch.is_at_start());
  }
}

at::Device ScalerState::first_device() const {
  return options.device().value_or(at::hasCUDA() ? at::kCUDA : at::kCPU);
}

const at::Tensor& ScalerState::scale_on(at::Device device) {
  if (!scale.defined()) {
    const at::TensorOptions there(device);
    scale = at::full({}, first_scale_, there.dtype(at::kFloat));
    growth_tracker = at::full({}, first_growth_tracker_, there.dtype(at::kInt));
    // Create the counters now: a graph that captures an update would create them anew in each
    // replay.
    history.counters(scale.device());
  }
  return scale;
}

void ScalerState::end_step() {
  watch.note_update(optimizers, !has_scaled && !is_known && !options.process_group());
  has_announced = has_scaled = false;
  optimizers.clear();
}

double ScalerState::host_scale() const {
  return scale.defined() ? scale.item<double>() : first_scale_;
}

int64_t ScalerState::host_growth_tracker() const {
  return growth_tracker.defined() ? growth_tracker.item<int64_t>() : first_growth_tracker_;
}

void ScalerState::set_scale(double new_scale, int64_t new_growth_tracker) {
  first_scale_ = new_scale;
  first_growth_tracker_ = new_growth_tracker;
  if (!scale.defined()) return;
  scale.fill_(new_scale);
  growth_tracker.fill_(new_growth_tracker);
}

std::optional<at::Tensor> ScalerState::unscaled_norm() const {
  std::vector<at::Tensor> norms;
  for (const OptimizerState& state : optimizers) {
    if (!state.inspection.has_whole_norms) return std::nullopt;
    for (const at::Tensor& norm : state.inspection.total_norms) {
      const at::Tensor there = on_device(norm, scale.device());
      norms.push_back(state.inspection.is_scaled ? there / scale : there);
    }
  }
  if (norms.empty()) return std::nullopt;
  return multi_tensor_norm(norms, /*ord=*/2, at::kFloat).total_norm;
}

}  // namespace ampfuse::amp
