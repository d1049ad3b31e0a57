#pragma once

#include <ampfuse/export.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace ampfuse {

/// The autocast settings of one type of device on this thread.
///
/// The backward of a torch::autograd::Function may run on another thread. If it needs the settings
/// of its forward, call capture() in forward, and create an AutocastGuard from the result in
/// backward.
struct AMPFUSE_API AutocastState {
  at::DeviceType device_type;  ///< the type of device that the settings are for
  bool enabled;                ///< true if operators cast their inputs
  at::ScalarType dtype;        ///< the dtype to which operators cast
  bool cache_enabled;          ///< true if weights that were cast are kept for the next use

  /// Returns the current settings of this thread.
  [[nodiscard]] static AutocastState capture(at::DeviceType device_type);
};

/// Sets autocast for one type of device until the end of the scope, as torch.autocast does in
/// Python. Then it restores the settings, also after an exception. Scopes may be nested,
/// also inside torch.autocast.
///
///     torch::Tensor logits;
///     {
///       ampfuse::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       logits = model->forward(inputs);
///     }
///
/// The end of the outermost scope drops the cache of cast weights. If an optimizer steps inside the
/// scope, call clear_cache() after the step; otherwise the next forward uses the old weights.
///
/// The settings are those of this thread, so each thread needs a guard of its own.
class AMPFUSE_API AutocastGuard {
 public:
  /// Sets autocast. Warns and leaves it off for CUDA without a GPU, and for dtypes other than half
  /// and bfloat16 on the CPU.
  ///
  /// \param device_type The type of device, for example torch::kCUDA.
  /// \param dtype The dtype to which operators cast. By default it is the current one of the device
  ///     type, which is half for CUDA and bfloat16 for the CPU unless the program has changed it.
  /// \param enabled False switches autocast off.
  /// \param cache_enabled Whether weights that were cast are kept. By default this stays as it is.
  /// \throws c10::Error for a type of device that has no autocast.
  [[nodiscard]] explicit AutocastGuard(at::DeviceType device_type,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       bool enabled = true,
                                       std::optional<bool> cache_enabled = std::nullopt);

  /// Sets autocast for the type of a device, for example of torch::Device("cuda:0").
  [[nodiscard]] explicit AutocastGuard(at::Device device,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       bool enabled = true,
                                       std::optional<bool> cache_enabled = std::nullopt)
      : AutocastGuard(device.type(), dtype, enabled, cache_enabled) {}

  /// Sets the captured settings.
  [[nodiscard]] explicit AutocastGuard(const AutocastState& state);

  ~AutocastGuard();  ///< restores the settings from before
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
 public:
  /// Switches autocast off.
  [[nodiscard]] NoAutocastGuard() = default;

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{c10::autocast_dispatch_keyset};
};

}  // namespace ampfuse
