#include "mistakes.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <utility>
#include <vector>

#include "scaler_state.h"

namespace ampfuse::amp {

namespace {

constexpr int kRepeatsForgiven = 2;

uint32_t version_of(const at::Tensor& grad) {
  return grad.defined() && !grad.is_inference() ? grad._version() : 0;
}

}  // namespace

void UnscaledGradient::note_unscaled(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      param_ = param;
      was_added_to_ = std::make_shared<bool>(false);
      return;
    }
  }
}

void UnscaledGradient::note_scaled_loss(const at::Tensor& product, bool watches) {
  if (!param_.defined()) return;
  was_reset_ |= !param_.grad().defined();
  if (!watches || !product.requires_grad()) return;
  product.register_hook([param = param_, was_added_to = was_added_to_](const at::Tensor&) {
    const at::Tensor before = param.grad();
    torch::autograd::Engine::get_default_engine().queue_callback(
        [param, was_added_to, before, version = version_of(before)] {
          const at::Tensor& now = param.grad();
          *was_added_to |= !now.is_same(before) || version_of(now) != version;
        });
  });
}

void UnscaledGradient::warn_if_computed_again() {
  if (!param_.defined() || !(was_reset() || *was_added_to_)) return;
  *this = {};  // one warning is enough
  TORCH_WARN(
      "gradients were computed again since they were unscaled, so they are still multiplied by the "
      "loss scale: call scaler.update() after each step, also after one that failed, and if a "
      "batch is dropped after scaler.unscale_(optimizer). Unscale or clip once, after the last "
      "micro-batch of a step");
}

void Watch::note_scaled_loss(const at::Tensor& loss, const at::Tensor& product) {
  ++losses_;
  have_stepped_.clear();
  repeats_ = 0;
  if (!loss.grad_fn()) return;
  const bool is_product = last_product_ && last_product_->lock() == loss.getIntrusivePtr();
  if (is_product && !std::exchange(has_warned_, true)) {
    TORCH_WARN(
        "a loss was multiplied by the loss scale twice, so its gradients are still multiplied by "
        "it after unscaling: call scaler.scale(loss) once");
  }
  has_graph_ = true;
  last_product_.emplace(product.getIntrusivePtr());
}

// One loss may serve several optimizers, with an update after each.
void Watch::note_update(const std::vector<OptimizerState>& optimizers, bool must_scale) {
  bool repeats = false;
  for (const OptimizerState& of_optimizer : optimizers) {
    if (of_optimizer.stage != Stage::kStepped) continue;
    const void* const first_param = of_optimizer.first_param.defined()
                                        ? of_optimizer.first_param.unsafeGetTensorImpl()
                                        : of_optimizer.address;
    repeats |= !have_stepped_.insert(first_param).second;
  }
  repeats_ += repeats;
  if (repeats && must_scale && has_graph_ && repeats_ == kRepeatsForgiven + 1) {
    TORCH_WARN("the gradients of ", repeats_,
               " steps in a row were divided by the loss scale, but no ",
               "loss was multiplied by it: call scaler.scale(loss).backward()");
  }
}

}  // namespace ampfuse::amp
