#include "adam_tensors.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/flat_hash_map.h>

#include "each_tensor.h"
#include "tensor_list.h"

namespace ampfuse {

namespace {

template <typename Prefetch>
void prefetch(const FusedAdamArguments& arguments, size_t t, const Prefetch& prefetch) {
  for (int column = 0; column < math::kAdamColumns; ++column) {
    if (arguments.has(column)) prefetch(arguments.tensor(column, t));
  }
  prefetch(arguments.state_steps[t].toTensor());
}

// Whether two dense tensors of one shape have their elements in the same order. Strides of
// dimensions with one element say nothing: the gradients of 1×1 convolutions have others than the
// weights.
bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Whether kernels can work on the tensor itself, in the order that the parameter's elements have if
// it leaves no gaps.
bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  return param.is_non_overlapping_and_dense() && tensor.is_non_overlapping_and_dense() &&
         same_order(tensor, param) && is_aligned(tensor);
}

// Null where that takes more than looking.
void* own_data(const at::Tensor& tensor, const at::Tensor& param) {
  if (!fits(tensor, param) || is_lazy_clone(tensor)) return nullptr;
  return const_cast<void*>(tensor.const_data_ptr());
}

AdamTensor look_at(const FusedAdamArguments& arguments, size_t t) {
  check_adam_tensor(arguments, t);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  const at::Tensor& step = arguments.state_steps[t].toTensor();
  const auto dtype_of = [&](int column) { return arguments.tensor(column, t).scalar_type(); };
  AdamTensor tensor = {};
  tensor.size = param.numel();
  tensor.dtypes = {
      dtype_of(math::kParam), dtype_of(math::kGrad), dtype_of(math::kExpAvg),
      arguments.has(math::kMaster) ? dtype_of(math::kMaster) : at::ScalarType::Undefined};
  for (int column = 0; column < math::kAdamColumns; ++column) {
    if (!arguments.has(column)) continue;
    check_allocated("fused_adam", adam_column_name(column), t, arguments.tensor(column, t));
    tensor.data[column] = own_data(arguments.tensor(column, t), param);
  }
  tensor.step = static_cast<float*>(own_data(step, step));
  return tensor;
}

}  // namespace

AdamTensors::AdamTensors(const FusedAdamArguments& arguments) : tensors_(arguments.count()) {
  for_each_index(
      tensors_.size(), tensors_.empty() ? nullptr : &arguments.tensor(math::kParam, 0),
      [&](size_t t, const auto& use) { prefetch(arguments, t, use); },
      [&](size_t t) { tensors_[t] = look_at(arguments, t); });
  ska::flat_hash_map<const void*, size_t> seen;
  seen.reserve(tensors_.size());
  for (size_t t = 0; t < tensors_.size(); ++t) {
    if (tensors_[t].size > 0) {
      // Where the parameter itself is, for which a copy may stand in.
      const void* own = tensors_[t].data[math::kParam];
      if (own == nullptr) own = arguments.tensor(math::kParam, t).mutable_data_ptr();
      const auto [first, fresh] = seen.emplace(own, t);
      TORCH_CHECK_VALUE(fresh, "fused_adam: params[", t,
                        "]: expected distinct tensors, got params[", first->second, "] again");
    }
    complete(arguments, t);
  }
}

// Finds places for those columns whose own memory was not enough to look at.
void AdamTensors::complete(const FusedAdamArguments& arguments, size_t t) {
  AdamTensor& tensor = tensors_[t];
  for (int column = 0; column < math::kAdamColumns && tensor.size > 0; ++column) {
    if (tensor.data[column] == nullptr && arguments.has(column)) {
      tensor.data[column] = data(arguments, column, t);
    }
  }
  if (tensor.step == nullptr) {
    tensor.step = arguments.state_steps[t].toTensor().mutable_data_ptr<float>();
  }
}

void* AdamTensors::data(const FusedAdamArguments& arguments, int column, size_t t) {
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  const at::Tensor& tensor = arguments.tensor(column, t);
  const bool is_written = arguments.is_written(column);
  if (fits(tensor, param)) return tensor.mutable_data_ptr();
  const at::Tensor copy =
      param.is_non_overlapping_and_dense()
          ? at::empty_strided(param.sizes(), param.strides(), tensor.options()).copy_(tensor)
          : tensor.clone(at::MemoryFormat::Contiguous);
  stand_ins_.push_back({tensor, copy, is_written});
  return copy.mutable_data_ptr();
}

void AdamTensors::write_back() const {
  for (const StandIn& stand_in : stand_ins_) {
    if (stand_in.is_written) stand_in.original.copy_(stand_in.copy);
  }
}

}  // namespace ampfuse
