#pragma once

#include <ampfuse/export.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace ampfuse {

/// The autocast settings of one type of device on this thread. The backward of a
/// torch::autograd::Function may run on another thread: if it needs the settings of its forward,
/// call capture() in forward and create AutocastGuard(state) in backward.
struct AMPFUSE_API AutocastState {
  at::DeviceType device_type;
  bool enabled;
  at::ScalarType dtype;
  bool cache_enabled;

  /// Returns the current settings.
  static AutocastState capture(at::DeviceType device_type);
};

/// torch.autocast for C++: sets autocast for one type of device until the end of the scope, and
/// then restores it, also after an exception. Scopes may be nested, also inside torch.autocast.
///
/// The end of the outermost scope drops the cache of cast weights. If an optimizer steps inside the
/// scope, call clear_cache() after the step; otherwise the next forward uses the old weights.
class AMPFUSE_API AutocastGuard {
 public:
  /// Without a dtype, uses the device's current autocast dtype: by default half for CUDA and
  /// bfloat16 for the CPU. Warns, and leaves autocast off, for CUDA without a GPU and for dtypes
  /// that the CPU does not cast to. Throws for devices without autocast.
  explicit AutocastGuard(at::DeviceType device_type,
                         std::optional<at::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);

  /// Enters the captured settings.
  explicit AutocastGuard(const AutocastState& state);

  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

  /// Drops the cache of cast weights. The next forward casts them again.
  static void clear_cache();

 private:
  AutocastState before_;
};

/// Switches autocast off for all devices until the end of the scope, for code that does its own
/// casts.
class AMPFUSE_API NoAutocastGuard {
  c10::impl::ExcludeDispatchKeyGuard excluded_{c10::autocast_dispatch_keyset};
};

}  // namespace ampfuse
