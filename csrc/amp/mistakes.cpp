#include "mistakes.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "scaler_state.h"

namespace ampfuse::amp {

namespace {

using torch::autograd::Node;

constexpr int kRepeatsForgiven = 2;

// Returns true if a backward pass of the loss computes the gradient of this parameter.
bool depends_on(const at::Tensor& loss, const at::Tensor& param) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
  if (!accumulator) return false;
  std::vector<Node*> nodes = {loss.grad_fn().get()};
  std::unordered_set<Node*> seen = {nullptr};
  while (!nodes.empty()) {
    Node* const node = nodes.back();
    nodes.pop_back();
    if (!seen.insert(node).second) continue;
    if (node == accumulator.get()) return true;
    for (const auto& edge : node->next_edges()) nodes.push_back(edge.function.get());
  }
  return false;
}

}  // namespace

void UnscaledGradient::note_unscaled(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      param_ = param;
      return;
    }
  }
}

void UnscaledGradient::note_scaled_loss(const at::Tensor& loss, bool looks_at_graph) {
  if (!param_.defined()) return;
  const at::Tensor& grad = param_.grad();
  was_reset_ |= !grad.defined();
  if (grad_.defined() || !grad.defined() || grad.is_inference()) return;
  if (!looks_at_graph || !depends_on(loss, param_)) return;
  grad_ = grad;
  version_ = grad._version();
}

bool UnscaledGradient::is_computed_again() const {
  if (!param_.defined() || !param_.grad().defined()) return false;
  const bool was_written =
      grad_.defined() && (!param_.grad().is_same(grad_) || grad_._version() != version_);
  return was_reset_ || was_written;
}

void UnscaledGradient::warn_if_computed_again() {
  if (!is_computed_again()) return;
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
