#pragma once

#include <ampfuse/export.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace ampfuse {

/// The settings of autocast for one type of device on this thread. The backward of a
/// torch::autograd::Function may run on another thread: if it needs the settings of its forward,
/// capture() them there, and enter AutocastGuard(state) in backward.
struct AMPFUSE_API AutocastState {
  at::DeviceType device_type;
  bool enabled;
  at::ScalarType dtype;
  bool cache_enabled;

  /// The present settings.
  static AutocastState capture(at::DeviceType device_type);
};

/// torch.autocast for C++: sets autocast for one type of device until the end of the scope, and
/// then restores it, also after an exception. Scopes may be nested, also in Python's.
///
/// The end of the outermost scope drops the cache of cast weights. If a scope lasts over an
/// optimizer's step, call clear_cache() after the step, or the next forward uses the old weights.
class AMPFUSE_API AutocastGuard {
 public:
  /// Without a dtype, uses the device's present one: by default half for CUDA and bfloat16 for the
  /// CPU. Warns, and leaves autocast off, for CUDA without a GPU and for dtypes that the CPU does
  /// not cast to. Throws for devices without autocast.
  explicit AutocastGuard(at::DeviceType device_type,
                         std::optional<at::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);

  /// Enters the captured settings.
  explicit AutocastGuard(const AutocastState& state);

  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

  /// Drops the cast copies of weights, which the next forward makes anew.
  static void clear_cache();

 private:
  AutocastState before_;
};

/// Switches autocast off for all devices until the end of the scope: for code that casts by itself.
class AMPFUSE_API NoAutocastGuard {
  c10::impl::ExcludeDispatchKeyGuard excluded_{c10::autocast_dispatch_keyset};
};

}  // namespace ampfuse
