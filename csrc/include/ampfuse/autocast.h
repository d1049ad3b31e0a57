#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace torch::autograd {
struct AutogradContext;
}

namespace ampfuse {

/// How autocast is set for one type of device on this thread.
struct AMPFUSE_API AutocastState {
  at::DeviceType device_type;
  bool enabled;
  at::ScalarType dtype;
  bool cache_enabled;

  /// As it is now.
  static AutocastState capture(at::DeviceType device_type);
};

/// torch.autocast for C++: autocast as asked for until the end of the scope, whatever way that is
/// left, and then as it was. Scopes nest, also in Python's; each sets one type of device.
///
/// The outermost scope's end drops the cache of cast weights. Within a scope that lasts over an
/// optimizer's step call clear_cache() after it, or the next forward uses the old weights.
class AMPFUSE_API AutocastGuard {
 public:
  /// Without a dtype the device's present one: half for CUDA, bfloat16 for the CPU, unless somebody
  /// has set another. Warns, and leaves autocast off, for CUDA where there is none and for dtypes
  /// that the CPU does not cast to; throws for devices that have no autocast.
  explicit AutocastGuard(at::DeviceType device_type,
                         std::optional<at::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);

  /// As it was when the state was captured.
  explicit AutocastGuard(const AutocastState& state);

  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

  /// Drops the cast copies of weights, which the next forward makes anew.
  static void clear_cache();

 private:
  AutocastState before_;
};

/// For the forward of a torch::autograd::Function whose backward has a CustomBackward: Python's
/// torch.amp.custom_fwd. Autocast stays as it is, unless it is on and `cast_inputs` are wanted:
/// then it is off until the end of the scope, and cast() casts.
///
///     static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x) {
///       const ampfuse::CustomForward amp(*context, torch::kCUDA, torch::kFloat);
///       x = amp.cast(x);
///       ...
///     }
///     static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
///                                                    torch::autograd::variable_list grads) {
///       const ampfuse::CustomBackward amp(*context);
///       ...
///     }
class AMPFUSE_API CustomForward {
 public:
  CustomForward(torch::autograd::AutogradContext& context, at::DeviceType device_type,
                std::optional<at::ScalarType> cast_inputs = std::nullopt);

  /// An input as forward is to compute with it. Other than float, half and bfloat16 tensors on the
  /// device stay as they are.
  at::Tensor cast(const at::Tensor& input) const;

 private:
  at::DeviceType device_type_;
  std::optional<at::ScalarType> cast_to_;
  std::optional<AutocastGuard> off_;
};

/// For the backward, torch.amp.custom_bwd: autocast as forward had it, until the end of the scope.
/// torch may run a backward on another thread, where autocast has its default dtype.
class AMPFUSE_API CustomBackward {
 public:
  explicit CustomBackward(const torch::autograd::AutogradContext& context);

 private:
  AutocastGuard as_in_forward_;
};

/// No autocast at all until the end of the scope, for any device: for code that casts by itself.
class AMPFUSE_API NoAutocastGuard {
  c10::impl::ExcludeDispatchKeyGuard excluded_{c10::autocast_dispatch_keyset};
};

}  // namespace ampfuse
