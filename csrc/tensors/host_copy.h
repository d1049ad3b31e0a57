// What the device knows, on the host, without the host waiting for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace ampfuse {

/// A copy that arrives by itself.
class HostCopy {
 public:
  /// Starts copying what the tensor will hold when the device comes to it.
  void send(const at::Tensor& tensor);

  /// What was sent last, or nothing while it is on its way.
  std::optional<at::Tensor> latest() const;

  /// Whether nothing was sent yet.
  bool is_idle() const { return !copy_.defined(); }

  /// What was sent last, once it is here.
  const at::Tensor& wait() const;

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;  // none: it is here
};

}  // namespace ampfuse
