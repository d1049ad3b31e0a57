#include <ATen/core/grad_mode.h>
#include <ampfuse/grad_scaler.h>

#include "scaler_state.h"

namespace ampfuse {

WeakScaler::WeakScaler(const GradScaler* scaler) : is_set_(scaler != nullptr) {
  if (scaler) state_ = scaler->checked_state();
}

std::shared_ptr<amp::ScalerState> WeakScaler::lock(const char* owner) const {
  auto state = state_.lock();
  TORCH_CHECK(state || !is_set_, owner,
              ": its GradScaler was destroyed, or another one was assigned to it. Keep the scaler "
              "as long as what uses it; it may be moved");
  return state;
}

std::optional<at::Tensor> WeakScaler::scale_tensor(const char* owner) const {
  const auto state = lock(owner);
  if (!state || !state->enabled) return std::nullopt;
  state->has_announced = state->has_announced || at::GradMode::is_enabled();
  return state->scale_on(state->first_device());
}

}  // namespace ampfuse
