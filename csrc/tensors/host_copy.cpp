#include "host_copy.h"

#include <ATen/ops/empty_like.h>

namespace ampfuse {

void HostCopy::send(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    copy_ = tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    return;
  }
  if (!copy_.defined()) {
    copy_ = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
    arrived_.emplace(at::kCUDA);
  }
  copy_.copy_(tensor, /*non_blocking=*/true);
  arrived_->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device()));
}

std::optional<at::Tensor> HostCopy::latest() const {
  if (!copy_.defined() || (arrived_ && !arrived_->query())) return std::nullopt;
  return copy_;
}

const at::Tensor& HostCopy::wait() const {
  if (arrived_) arrived_->synchronize();
  return copy_;
}

}  // namespace ampfuse
