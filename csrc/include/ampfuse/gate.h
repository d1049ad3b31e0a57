#pragma once

#include <ampfuse/export.h>
#include <ampfuse/weak_scaler.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <deque>
#include <memory>

namespace ampfuse {

class HostCopy;

/// Steps a learning rate scheduler unless the last step of the optimizer was skipped.
/// GradScaler::gate() makes it.
///
///     auto schedule = scaler.gate(std::make_shared<torch::optim::StepLR>(optimizer, 30, 0.1));
///     ...
///     scaler.step(optimizer);
///     scaler.update();
///     schedule.step();
///
/// On a GPU it is known some steps later whether a step was skipped. The scheduler follows then.
/// The host waits only if it is more than 16 steps ahead.
///
/// The scheduler refers to the optimizer, which must not move. One thread at a time may use a gate.
class AMPFUSE_API Gate {
 public:
  /// Makes a gate for a scheduler that is stepped after each update of the scaler.
  ///
  /// \throws c10::ValueError if the scheduler is null.
  Gate(std::shared_ptr<torch::optim::LRScheduler> scheduler, WeakScaler scaler);
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  Gate(Gate&&) = default;             ///< the moved-from gate may only be assigned to or destroyed
  Gate& operator=(Gate&&) = default;  ///< the moved-from gate may only be assigned to or destroyed

  /// Steps the scheduler, once after each update(), unless the step was skipped.
  ///
  /// \throws c10::Error if the scaler was destroyed.
  void step();

  /// Waits until the scheduler has followed all steps. Call this before a checkpoint is saved or
  /// loaded. Otherwise the scheduler and its learning rates may be up to 16 steps behind.
  void wait();

 private:
  void follow();

  std::shared_ptr<torch::optim::LRScheduler> scheduler_;
  WeakScaler scaler_;
  std::deque<std::shared_ptr<HostCopy>> unknown_;  // of each step: whether it was skipped
};

}  // namespace ampfuse
