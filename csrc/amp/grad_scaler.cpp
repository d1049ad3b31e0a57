#include <ampfuse/grad_scaler.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/le.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <ampfuse/clip_grad.h>
#include <ampfuse/optim.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>

#include <typeinfo>

#include "../ops/fused_step.h"
#include "../tensors/capture.h"
#include "../tensors/device_scalars.h"
#include "scale_policy.h"
#include "scaler_state.h"

namespace ampfuse {

namespace {

using amp::Inspection;
using amp::OptimizerState;
using amp::ScalerState;
using amp::Stage;

void check_has_scale(const ScalerState& state, const char* what) {
  TORCH_CHECK(state.scale.defined(), "Attempted ", what,
              " but _scale is None.  This may indicate your script did not use "
              "scaler.scale(loss or outputs) earlier in the iteration.");
}

void check_is_scaled(const ScalerState& state, const char* what) {
  TORCH_CHECK(
      !state.has_announced || state.has_scaled || state.is_known, "Attempted ", what,
      " but no loss was scaled since the last update, although a loss module with a scaler was "
      "called. Did you call scaler.scale(loss).backward()?");
}

void check_closure(const torch::optim::Optimizer& optimizer, bool has_closure) {
  constexpr const char* refusal =
      "Closure use is not currently supported if GradScaler is enabled.";
  TORCH_CHECK(!has_closure, refusal);
  TORCH_CHECK(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr, refusal,
              " LBFGS needs a closure: train without a scaler, in bfloat16 or float32");
}

void unscale(ScalerState& state, OptimizerState& of_optimizer,
             const torch::optim::Optimizer& optimizer) {
  // The reciprocal is computed in double and rounded once, as torch does.
  const at::Tensor inv_scale = state.scale.to(at::kDouble).reciprocal().to(at::kFloat);
  of_optimizer.inspection =
      amp::inspect(optimizer, inv_scale, at::zeros_like(state.scale),
                   state.options.allow_fp16_grads(), state.options.process_group());
  of_optimizer.stage = Stage::kUnscaled;
  of_optimizer.unscaled.note_unscaled(optimizer);
}

void inspect_scaled(ScalerState& state, OptimizerState& of_optimizer,
                    const torch::optim::Optimizer& optimizer) {
  // A scale without a finite inverse counts as an overflow, whatever the gradients are.
  at::Tensor found_inf = at::empty_like(state.scale);
  at::le_out(found_inf, state.scale, math::kLargestScaleWithoutInverse);
  of_optimizer.inspection = amp::inspect(optimizer, at::ones_like(state.scale), found_inf,
                                         /*allow_fp16=*/true, state.options.process_group());
  of_optimizer.inspection.is_scaled = true;
}

// Returns a flag: 1 if the norm of the gradients is an outlier, else 0.
at::Tensor outlier(ScalerState& state) {
  TORCH_CHECK_VALUE(state.optimizers.size() == 1,
                    "skip_outliers: expected one optimizer between two updates, got ",
                    state.optimizers.size());
  const auto norm = state.unscaled_norm();
  const at::Tensor& scale = state.scale;
  if (!norm && state.optimizers[0].inspection.total_norms.empty()) return at::zeros_like(scale);
  TORCH_CHECK_VALUE(norm, "skip_outliers: the norm of the gradients is not known, since some of ",
                    "them are sparse");
  return norm->gt(state.history.norms(scale.device())[math::kNormLimit]).to(at::kFloat);
}

void raise_if_collapsed(ScalerState& state) {
  const auto limit = state.options.max_consecutive_skips();
  // A capture takes no step, and consecutive_skips() must not be captured.
  if (!limit || (state.scale.is_cuda() && is_capturing())) return;
  const int64_t skips = state.history.consecutive_skips();
  if (skips < *limit) return;
  throw ScaleCollapseError(c10::str(skips,
                                    " steps in a row overflowed (max_consecutive_skips: ", *limit,
                                    "): the gradients are not finite at any scale that was tried. "
                                    "GradScaler::overflow_report(model) names the parameters"));
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : state_(std::make_shared<ScalerState>(std::move(options))) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

const std::shared_ptr<ScalerState>& GradScaler::checked_state() const {
  TORCH_CHECK(state_,
              "GradScaler: this scaler was moved from. Use the one that it was moved to, or assign "
              "another one to it");
  return state_;
}

bool GradScaler::is_enabled() const {
  return checked_state()->enabled;
}

const GradScalerOptions& GradScaler::options() const {
  return checked_state()->options;
}

GradScalerOptions& GradScaler::options() {
  return checked_state()->options;
}

int64_t detail::scaled_losses(const GradScaler& scaler) {
  return scaler.checked_state()->watch.losses();
}

// --- losses and gradients ------------------------------------------------------------------------

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!is_enabled()) return outputs;
  TORCH_CHECK_TYPE(outputs.defined(), "GradScaler::scale: expected a tensor, got none");
  // Replays of a graph scale losses without this function.
  if (outputs.is_cuda() && is_capturing()) state_->is_known = true;
  const at::Tensor product =
      outputs * on_device(state_->scale_on(outputs.device()), outputs.device());
  state_->note_scaled_loss(outputs, product);
  return product;
}

std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  check_has_scale(*state_, "unscale_");
  check_is_scaled(*state_, "unscale_");
  OptimizerState& of_optimizer = state_->current(optimizer);
  TORCH_CHECK(of_optimizer.stage != Stage::kUnscaled,
              "unscale_() has already been called on this optimizer since the last update(). Is "
              "scaler.update() missing?");
  TORCH_CHECK(of_optimizer.stage != Stage::kStepped, "unscale_() is being called after step().");
  unscale(*state_, of_optimizer, optimizer);
}

at::Tensor GradScaler::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm) {
  const std::vector<at::Tensor> params = amp::params_of(optimizer);
  if (!is_enabled()) return ampfuse::clip_grad_norm_(params, max_norm);
  OptimizerState& of_optimizer = state_->current(optimizer);
  if (of_optimizer.stage == Stage::kUnscaled) {
    of_optimizer.unscaled.warn_if_computed_again();
    return ampfuse::clip_grad_norm_(params, max_norm);
  }
  unscale_(optimizer);
  const Inspection& inspection = of_optimizer.inspection;
  if (!inspection.has_whole_norms || inspection.total_norms.empty()) {
    return ampfuse::clip_grad_norm_(params, max_norm);
  }
  const at::Tensor total_norm = joined_norm(inspection.total_norms).to(amp::norm_dtype_of(params));
  clip_grads_with_norm_(params, max_norm, total_norm);
  return total_norm;
}

at::Tensor GradScaler::step(torch::optim::Optimizer& optimizer,
                            torch::optim::Optimizer::LossClosure closure) {
  if (!is_enabled()) return optimizer.step(std::move(closure));
  check_closure(optimizer, closure != nullptr);
  check_has_scale(*state_, "step");
  check_is_scaled(*state_, "step");
  OptimizerState& of_optimizer = state_->current(optimizer);
  TORCH_CHECK(
      of_optimizer.stage != Stage::kStepped,
      "step() has already been called since the last update(). Is scaler.update() missing?");
  auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  if (of_optimizer.stage == Stage::kReady) {
    if (fused) {
      inspect_scaled(*state_, of_optimizer, optimizer);
    } else {
      unscale(*state_, of_optimizer, optimizer);
    }
  } else {
    of_optimizer.unscaled.warn_if_computed_again();
  }
  const std::vector<at::Tensor>& flags = of_optimizer.inspection.found_infs;
  TORCH_CHECK(
      !flags.empty() || fused || state_->options.allow_no_grads(),
      "No inf checks were recorded for this optimizer: none of its parameters has a gradient. Did "
      "you call scaler.scale(loss).backward()? If you did, was zero_grad() called after it, or are "
      "they the parameters of another model? If it is intended, set allow_no_grads");
  // Without gradients nothing can overflow.
  at::Tensor found_inf =
      flags.empty() ? at::zeros_like(state_->scale) : largest(flags, state_->scale.device());
  if (state_->options.skip_outliers()) found_inf = at::maximum(found_inf, outlier(*state_));
  state_->history.note_step(found_inf, of_optimizer.inspection);
  at::Tensor loss;
  if (fused) {
    loss = step_with_tensors(*fused, of_optimizer.inspection, found_inf);
  } else if (flags.empty() || found_inf.item<float>() == 0) {  // the host waits for the flag
    loss = optimizer.step();
  }
  // of_optimizer may dangle here: the step may have called this scaler, which changes its list.
  state_->of(optimizer).stage = Stage::kStepped;
  return loss;
}

// Sets scale, flag and norms on the optimizer for the duration of its step.
at::Tensor GradScaler::step_with_tensors(FusedOptimizer& optimizer,
                                         const amp::Inspection& inspection,
                                         const at::Tensor& found_inf) {
  struct Reset {
    FusedOptimizer& optimizer;
    ~Reset() {
      optimizer.grad_scale.reset();
      optimizer.found_inf.reset();
      optimizer.known_norms_.clear();
    }
  } const reset{optimizer};
  const ScalerState& state = *state_;
  if (inspection.is_scaled) {
    const auto& users_own = optimizer.grad_scale;
    optimizer.grad_scale =
        users_own ? state.scale * on_device(*users_own, state.scale.device()) : state.scale;
  }
  optimizer.found_inf = found_inf;
  // A class of the user's may write gradients in its step before it calls ours.
  const std::type_info& type = typeid(optimizer);
  const bool is_own_step = type == typeid(Adam) || type == typeid(AdamW) || type == typeid(SGD);
  if (is_own_step && inspection.is_scaled) optimizer.known_norms_ = inspection.total_norms;
  // A step that writes gradients back changes the version that is read here.
  auto gradient = inspection.is_scaled ? optimizer.first_gradient() : std::nullopt;
  const at::Tensor loss = optimizer.step();
  optimizer.stepped_with_ = std::move(gradient);
  return loss;
}

// --- the scale -----------------------------------------------------------------------------------

void GradScaler::update() {
  if (!is_enabled()) return;
  check_has_scale(*state_, "update");
  amp::check_options(state_->options);
  const c10::NoGradGuard no_grad;
  const at::Device device = state_->scale.device();
  std::vector<at::Tensor> found_infs;
  for (const OptimizerState& of_optimizer : state_->optimizers) {
    for (const at::Tensor& flag : of_optimizer.inspection.found_infs) {
      found_infs.push_back(on_device(flag, device));
    }
  }
  TORCH_CHECK(
      !found_infs.empty() || state_->options.allow_no_grads(),
      "No inf checks were recorded prior to update: no optimizer with gradients was stepped or "
      "unscaled by the scaler since the last update. Did you call scaler.scale(loss).backward() "
      "and scaler.step(optimizer)? If you did, was zero_grad() called between them, or are the "
      "optimizer's parameters those of another model? If it is intended, set allow_no_grads");
  if (!found_infs.empty()) {
    UpdateScaleOptions policy = amp::update_options(state_->options);
    const at::Tensor& counters = state_->history.counters(device);
    const auto& history = state_->history.history();
    ScaleTensors tensors = {state_->scale, state_->growth_tracker, counters, history};
    if (history || policy.skip_outliers) policy.norm = state_->unscaled_norm();
    if (policy.skip_outliers && policy.norm) tensors.norms = state_->history.norms(device);
    update_scale(tensors, found_infs, policy);
  }
  state_->end_step();
  raise_if_collapsed(*state_);
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  check_has_scale(*state_, "update");
  amp::check_scale("new_scale", new_scale);
  state_->scale.fill_(new_scale);
  state_->end_step();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!is_enabled()) return;
  check_has_scale(*state_, "update");
  TORCH_CHECK(new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False.");
  state_->scale.copy_(new_scale.reshape({}));
  state_->end_step();
}

double GradScaler::get_scale() const {
  checked_state()->is_known = true;
  return is_enabled() ? state_->host_scale() : 1;
}

at::Tensor GradScaler::scale_tensor() {
  if (!is_enabled()) return at::ones({}, at::TensorOptions(at::kFloat));
  state_->is_known = true;
  return state_->scale_on(state_->first_device());
}

// --- results of past steps -----------------------------------------------------------------------

at::Tensor GradScaler::step_skipped() const {
  return checked_state()->history.step_skipped();
}

bool GradScaler::was_skipped() {
  return checked_state()->history.was_skipped();
}

Gate GradScaler::gate(std::shared_ptr<torch::optim::LRScheduler> scheduler) const {
  return Gate(std::move(scheduler), this);
}

void GradScaler::load_history(std::vector<ScaleRecord> records) {
  checked_state()->history.put_records(std::move(records));
}

std::vector<ScaleRecord> GradScaler::history() const {
  return checked_state()->history.records();
}

std::vector<std::string> GradScaler::overflow_report(const torch::nn::Module& model) const {
  return overflow_report(model.named_parameters());
}

std::vector<std::string> GradScaler::overflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) const {
  std::vector<std::string> names;
  for (const at::Tensor& offender : checked_state()->history.offenders()) {
    for (const auto& named : named_parameters) {
      if (named.value().is_same(offender)) names.push_back(named.key());
    }
  }
  return names;
}

}  // namespace ampfuse
