#include "linear_cross_entropy_logits.h"

#include <ATen/ops/empty.h>

#include "../cpu/fresh_memory.h"
#include "../tensors/dtype_name.h"

namespace ampfuse {

LinearLogits::LinearLogits(const CrossEntropyKernels& kernels,
                           const LinearCrossEntropyArguments& arguments, const LinearLayer& layer)
    : options_(arguments.hidden.options()),
      dtype_(arguments.logits_dtype),
      grad_dtype_(layer.gradient_dtype()),
      has_own_grad_(grad_dtype_ != dtype_ && !kernels.narrows_in_place) {
  TORCH_CHECK_TYPE(dtype_ == grad_dtype_ || dtype_ == layer.sum_dtype(), kLinearCrossEntropy,
                   ": logits_dtype: expected ", dtype_name(layer.sum_dtype()),
                   ", since this device has no products of ", dtype_name(arguments.dtype), ", got ",
                   dtype_name(dtype_));
}

int64_t LinearLogits::logit_bytes() const {
  const size_t bytes =
      c10::elementSize(dtype_) + (has_own_grad_ ? c10::elementSize(grad_dtype_) : 0);
  return static_cast<int64_t>(bytes);
}

void LinearLogits::allocate(int64_t rows, int64_t classes, bool with_gradient) {
  // Rows start at aligned addresses for any number of classes, which products and kernels prefer.
  constexpr int64_t kAlignment = 64;
  const int64_t stride = (classes + kAlignment - 1) / kAlignment * kAlignment;
  const auto memory_for_rows = [&](at::ScalarType dtype) {
    const at::Tensor memory = at::empty({rows, stride}, options_.dtype(dtype));
    // The memory of the weight's gradient is not prepared: it is written so much later that the
    // preparation would take more time than it saves.
    prepare_fresh_memory(memory);
    return memory;
  };
  values_ = memory_for_rows(dtype_);
  if (!with_gradient) {
    grad_ = at::empty({0}, options_.dtype(grad_dtype_));
    return;
  }
  grad_ = has_own_grad_ ? memory_for_rows(grad_dtype_) : values_.view(grad_dtype_);
}

void LinearLogits::free() {
  values_.reset();
  grad_.reset();
}

at::Tensor LinearLogits::values(int64_t rows, int64_t classes) const {
  return values_.narrow(0, 0, rows).narrow(1, 0, classes);
}

at::Tensor LinearLogits::grad(int64_t rows, int64_t classes) const {
  return grad_.dim() == 1 ? grad_ : grad_.narrow(0, 0, rows).narrow(1, 0, classes);
}

at::Tensor LinearLogits::padded_grad(int64_t rows, int64_t classes, int64_t padded_classes) const {
  at::Tensor all = grad(rows, padded_classes);
  if (padded_classes > classes) all.narrow(1, classes, padded_classes - classes).zero_();
  return all;
}

}  // namespace ampfuse
