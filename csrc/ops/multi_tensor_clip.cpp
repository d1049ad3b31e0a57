#include "multi_tensor_clip.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/multi_tensor_clip.h>

#include "../tensors/tensor_list.h"
#include "registration.h"

namespace ampfuse {

void multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm, double max_norm) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ampfuse::multi_tensor_clip", "")
                             .typed<void(at::TensorList, const at::Tensor&, double)>();
  op.call(tensors, total_norm, max_norm);
}

void check_multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm) {
  check_writable_tensors("multi_tensor_clip", tensors);
  check_clip_norm(tensors, total_norm);
}

void check_clip_norm(at::TensorList tensors, const at::Tensor& total_norm) {
  check_scalar("multi_tensor_clip", "total_norm", total_norm, {at::kFloat, at::kDouble}, tensors);
}

namespace {

void multi_tensor_clip_no_backend(at::TensorList tensors, const at::Tensor& total_norm, double) {
  check_multi_tensor_clip(tensors, total_norm);
  refuse_backend("multi_tensor_clip", tensors);
}

}  // namespace

AMPFUSE_OPERATORS(m) {
  m.def("multi_tensor_clip(Tensor(a!)[] tensors, Tensor total_norm, float max_norm) -> ()",
        {at::Tag::pt2_compliant_tag});
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("multi_tensor_clip", multi_tensor_clip_no_backend);
}

}  // namespace ampfuse
