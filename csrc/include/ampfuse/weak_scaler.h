#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <memory>
#include <optional>

namespace ampfuse {

class GradScaler;

namespace amp {
class ScalerState;
}  // namespace amp

/// Refers to a GradScaler that may be moved or destroyed meanwhile, or to none. Loss modules have
/// one: `criterion->scaler = &scaler` sets it.
class AMPFUSE_API WeakScaler {
 public:
  /// Refers to this scaler, or to none if it is null.
  WeakScaler(const GradScaler* scaler = nullptr);

  /// Returns true if this refers to a scaler, which may no longer exist.
  explicit operator bool() const { return is_set_; }

  /// Returns the scale for a loss that is to be scaled, or nothing if there is no scaler or it is
  /// disabled. `owner` is named in the message of an error.
  ///
  /// \throws c10::Error if the scaler was destroyed, or another one was assigned to it.
  std::optional<at::Tensor> scale_tensor(const char* owner) const;

 private:
  friend class Gate;

  std::shared_ptr<amp::ScalerState> lock(const char* owner) const;

  std::weak_ptr<amp::ScalerState> state_;
  bool is_set_;
};

}  // namespace ampfuse
