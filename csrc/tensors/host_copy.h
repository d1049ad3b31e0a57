// Copies of device tensors on the host, made without the host waiting.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace ampfuse {

class HostCopy {
 public:
  /// Enqueues a copy of the tensor on its device's current stream. Copies a CPU tensor at once.
  void send(const at::Tensor& tensor);

  /// Returns the value sent last, or nullopt if none was sent or it has not arrived.
  std::optional<at::Tensor> latest() const;

  /// True if nothing was sent yet.
  bool is_unsent() const { return !copy_.defined(); }

  /// Waits for the value sent last, and returns it.
  const at::Tensor& wait() const;

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;  // nullopt for CPU tensors
};

}  // namespace ampfuse
