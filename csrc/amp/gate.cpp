#include <ampfuse/gate.h>

#include <utility>

#include "../tensors/host_copy.h"
#include "scaler_state.h"

namespace ampfuse {

namespace {

constexpr size_t kMostUnknown = 16;  // steps that the host may be ahead of a GPU before it waits

}  // namespace

Gate::Gate(std::shared_ptr<torch::optim::LRScheduler> scheduler, WeakScaler scaler)
    : scheduler_(std::move(scheduler)), scaler_(std::move(scaler)) {
  TORCH_CHECK_VALUE(scheduler_, "gate: scheduler: expected a scheduler, got null");
}

void Gate::step() {
  const auto scaler = scaler_.lock("gate");
  if (!scaler || !scaler->enabled) {
    scheduler_->step();
    return;
  }
  unknown_.push_back(std::make_shared<HostCopy>());
  unknown_.back()->send(scaler->history.step_skipped());
  while (!unknown_.empty() && (unknown_.front()->latest() || unknown_.size() > kMostUnknown)) {
    follow();
  }
}

void Gate::wait() {
  while (!unknown_.empty()) follow();
}

void Gate::follow() {
  const bool is_skipped = unknown_.front()->wait().item<bool>();
  unknown_.pop_front();
  if (!is_skipped) scheduler_->step();
}

}  // namespace ampfuse
