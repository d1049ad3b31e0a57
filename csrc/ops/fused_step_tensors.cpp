#include "fused_step_tensors.h"

#include <ATen/ops/empty_strided.h>

#include "../tensors/each_tensor.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

namespace {

template <typename Prefetch>
void touch(const FusedStepArguments& arguments, size_t t, const Prefetch& prefetch) {
  for (int column = 0; column < math::kMostColumns; ++column) {
    if (arguments.has(column)) prefetch(arguments.tensor(column, t));
  }
  if (arguments.has_steps()) prefetch(arguments.step(t));
}

// True if two dense tensors of one shape have their elements in the same order. The strides of
// dimensions of size 1 do not matter: gradients of 1×1 convolutions have different ones there.
bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// True if kernels can use the tensor in place: it is aligned, it and the parameter are dense, and
// their elements are in the same order.
bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  return param.is_non_overlapping_and_dense() && tensor.is_non_overlapping_and_dense() &&
         same_order(tensor, param) && is_aligned(tensor);
}

// Throws if the elements of a coded moment are in another order than the parameter's, or than those
// of its dense copy. Groups of codes follow the memory, so a copy in the other order would give
// them units of other groups.
void check_code_order(const FusedStepArguments& arguments, int column, size_t t) {
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  const at::Tensor& codes = arguments.tensor(column, t);
  const bool is_dense = param.is_non_overlapping_and_dense();
  TORCH_CHECK_VALUE(is_dense ? fits(codes, param) : codes.is_contiguous(), arguments.names->op,
                    ": ", arguments.column_name(column), "[", t,
                    "]: expected the strides of params[", t, "], ", param.sym_strides(), ", got ",
                    codes.sym_strides(),
                    "; 8-bit moments can follow neither a change of the memory format nor a "
                    "transposed tensor with gaps");
}

// Returns the tensor's own memory, or null if it has to be copied or is a lazy clone.
void* own_data(const at::Tensor& tensor, const at::Tensor& param) {
  if (!fits(tensor, param) || is_lazy_clone(tensor)) return nullptr;
  return const_cast<void*>(tensor.const_data_ptr());
}

StepTensor described(const FusedStepArguments& arguments, size_t t) {
  check_step_tensor(arguments, t);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  const auto dtype_of = [&](int column) {
    return arguments.has(column) ? arguments.tensor(column, t).scalar_type() : kNoDtype;
  };
  StepTensor tensor = {};
  tensor.size = param.numel();
  tensor.dtypes = {dtype_of(math::kParam), dtype_of(math::kGrad), dtype_of(math::kFirstMoment),
                   dtype_of(math::kMaster), dtype_of(math::kEma)};
  for (int column = 0; column < math::kMostColumns; ++column) {
    if (!arguments.has(column)) continue;
    check_memory(arguments.names->op, arguments.column_name(column), t,
                 arguments.tensor(column, t));
    if (math::is_moment(column) && arguments.is_coded()) check_code_order(arguments, column, t);
    const at::Tensor& own = arguments.tensor(column, t);
    tensor.data[column] = own_data(own, math::is_unit(column) ? own : param);
  }
  if (arguments.has_steps()) {
    const at::Tensor& step = arguments.step(t);
    check_memory(arguments.names->op, "state_steps", t, step);
    tensor.step = static_cast<float*>(own_data(step, step));
  }
  return tensor;
}

// Throws if tensors of a column share memory. State is not checked: the optimizer owns it.
void check_column_disjoint(const FusedStepArguments& arguments, math::StepColumn column,
                           std::vector<const void*> storages) {
  for (size_t t = 0; t < storages.size(); ++t) {
    const at::Tensor& tensor = arguments.tensor(column, t);
    if (storages[t] != nullptr || tensor.numel() == 0) continue;
    tensor.mutable_data_ptr();  // a lazy clone gets its own memory now
    storages[t] = written_storage(tensor);
  }
  check_disjoint(arguments.names->op, arguments.column_name(column), storages,
                 [&](size_t t) -> const at::Tensor& { return arguments.tensor(column, t); });
}

}  // namespace

StepTensors::StepTensors(const FusedStepArguments& arguments) : tensors_(arguments.count()) {
  const bool writes_grads = arguments.is_written(math::kGrad);
  std::vector<const void*> params(tensors_.size());
  std::vector<const void*> grads(writes_grads ? tensors_.size() : 0);
  for_each_index(
      tensors_.size(), [&](size_t t, const auto& prefetch) { touch(arguments, t, prefetch); },
      [&](size_t t) {
        tensors_[t] = described(arguments, t);
        params[t] = written_storage(arguments.tensor(math::kParam, t));
        if (writes_grads) grads[t] = written_storage(arguments.tensor(math::kGrad, t));
      });
  int64_t next_index = 0;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    complete(arguments, t);
    const int64_t first =
        arguments.first_indices.empty() ? next_index : arguments.first_indices[t].toInt();
    TORCH_CHECK_VALUE(first >= 0, arguments.names->op, ": first_indices[", t,
                      "]: expected at least 0, got ", first);
    tensors_[t].first_index = first;
    next_index = math::index_after(next_index, tensors_[t].size);
  }
  check_column_disjoint(arguments, math::kParam, std::move(params));
  if (writes_grads) check_column_disjoint(arguments, math::kGrad, std::move(grads));
}

// Fills in the pointers that described() left null: lazy clones get their own memory, other tensors
// a dense copy.
void StepTensors::complete(const FusedStepArguments& arguments, size_t t) {
  StepTensor& tensor = tensors_[t];
  for (int column = 0; column < math::kMostColumns && tensor.size > 0; ++column) {
    if (tensor.data[column] == nullptr && arguments.has(column)) {
      tensor.data[column] = data(arguments, column, t);
    }
  }
  if (tensor.step == nullptr && arguments.has_steps()) {
    tensor.step = arguments.step(t).mutable_data_ptr<float>();
  }
}

void* StepTensors::data(const FusedStepArguments& arguments, int column, size_t t) {
  const at::Tensor& tensor = arguments.tensor(column, t);
  const at::Tensor& param = math::is_unit(column) ? tensor : arguments.tensor(math::kParam, t);
  const bool is_written = arguments.is_written(column);
  if (fits(tensor, param)) return tensor.mutable_data_ptr();
  const at::Tensor copy =
      param.is_non_overlapping_and_dense()
          ? at::empty_strided(param.sizes(), param.strides(), tensor.options()).copy_(tensor)
          : tensor.clone(at::MemoryFormat::Contiguous);
  dense_copies_.push_back({tensor, copy, is_written});
  return copy.mutable_data_ptr();
}

void StepTensors::write_back() const {
  for (const DenseCopy& dense_copy : dense_copies_) {
    if (dense_copy.is_written) dense_copy.original.copy_(dense_copy.copy);
  }
}

}  // namespace ampfuse
