#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ampfuse/autocast.h>

#include "../tensors/float_dtypes.h"

namespace ampfuse {

namespace {

// Returns whether autocast can be enabled; if not, warns in torch's words.
bool can_be_enabled(at::DeviceType device_type, at::ScalarType dtype) {
  if (device_type == at::kCUDA && !at::hasCUDA()) {
    TORCH_WARN("User provided device_type of 'cuda', but CUDA is not available. Disabling");
    return false;
  }
  if (device_type == at::kCPU && !is_16bit(dtype)) {
    TORCH_WARN(
        "In CPU autocast, but the target dtype is not supported. Disabling autocast. CPU Autocast "
        "only supports dtype of BFloat16, Half, got ",
        dtype);
    return false;
  }
  return true;
}

AutocastState requested_state(at::DeviceType device_type, std::optional<at::ScalarType> dtype,
                              bool enabled, std::optional<bool> cache_enabled) {
  TORCH_CHECK(at::autocast::is_autocast_available(device_type),
              "AutocastGuard: expected a device that has autocast, got ", device_type);
  const at::ScalarType to = dtype.value_or(at::autocast::get_autocast_dtype(device_type));
  return {device_type, enabled && can_be_enabled(device_type, to), to,
          cache_enabled.value_or(at::autocast::is_autocast_cache_enabled())};
}

void set(const AutocastState& state) {
  at::autocast::set_autocast_enabled(state.device_type, state.enabled);
  at::autocast::set_autocast_dtype(state.device_type, state.dtype);
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
}

}  // namespace

AutocastState AutocastState::capture(at::DeviceType device_type) {
  return {device_type, at::autocast::is_autocast_enabled(device_type),
          at::autocast::get_autocast_dtype(device_type), at::autocast::is_autocast_cache_enabled()};
}

AutocastGuard::AutocastGuard(at::DeviceType device_type, std::optional<at::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : AutocastGuard(requested_state(device_type, dtype, enabled, cache_enabled)) {}

AutocastGuard::AutocastGuard(const AutocastState& state)
    : before_(AutocastState::capture(state.device_type)) {
  set(state);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  // A cache that outlived the outermost guard would return weights as they were cast before the
  // last optimizer step.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(before_);
}

void AutocastGuard::clear_cache() {
  at::autocast::clear_cache();
}

}  // namespace ampfuse
