#include "tensor_list.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/COW.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>

#include "dtype_name.h"
#include "each_tensor.h"

namespace ampfuse {

namespace {

bool is_supported(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

void check_tensor(const char* op, size_t index, const at::Tensor& tensor, const at::Tensor& first) {
  check_strided(op, "tensors", index, tensor);
  TORCH_CHECK_TYPE(
      is_supported(tensor.scalar_type()), op, ": tensors[", index,
      "]: expected a tensor of dtype float16, bfloat16, float32, float64, complex64 or "
      "complex128, got ",
      dtype_name(tensor.scalar_type()));
  check_device(op, "tensors", index, tensor, "tensors", first);
}

void check_writable(const char* op, size_t index, const at::Tensor& tensor,
                    const at::Tensor& first) {
  check_tensor(op, index, tensor, first);
  check_no_overlap(op, "tensors", index, tensor);
}

const c10::Storage& storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

// The memory that a tensor spans.
struct Extent {
  const char* begin;
  const char* end;
  bool is_dense;
  size_t index;  // in the list
};

Extent extent_of(const at::Tensor& tensor, size_t index) {
  int64_t elements = 1;  // from the first to the last, gaps included
  for (int64_t d = 0; d < tensor.dim(); ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {begin, begin + elements * item, tensor.is_non_overlapping_and_dense(), index};
}

void refuse_pair(const char* op, const char* list, const Extent& a, const Extent& b) {
  const auto [first, second] = std::minmax(a.index, b.index);
  if (a.begin == b.begin && a.end == b.end) {
    TORCH_CHECK_VALUE(false, op, ": ", list, "[", second, "]: expected distinct tensors, got ",
                      list, "[", first, "] again");
  }
  TORCH_CHECK_VALUE(false, op, ": ", list, "[", second,
                    "]: expected a tensor that shares no memory with the others, got one that "
                    "overlaps ",
                    list, "[", first, "]");
}

TensorRun as_run(const at::Tensor& dense, void* data, ComplexAs complex) {
  const at::ScalarType dtype = dense.scalar_type();
  if (complex == ComplexAs::kRealPairs && c10::isComplexType(dtype)) {
    return {data, 2 * dense.numel(), c10::toRealValueType(dtype)};
  }
  return {data, dense.numel(), dtype};
}

}  // namespace

void check_strided(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", list, "[", index, "]: expected a tensor, got none");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op, ": ", list, "[", index,
                    "]: expected a strided tensor, got layout ", tensor.layout());
}

void check_device(const char* op, const char* list, size_t index, const at::Tensor& tensor,
                  const char* first_list, const at::Tensor& first) {
  TORCH_CHECK_VALUE(tensor.device() == first.device(), op, ": ", list, "[", index,
                    "]: expected device ", first.device(), ", that of ", first_list, "[0], got ",
                    tensor.device());
}

bool has_memory(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  const bool is_traced =
      keys.has_any(c10::python_ks) || keys.has_backend(c10::BackendComponent::MetaBit);
  // Traced tensors have no memory, and no kernel reads them. Sparse tensors and the wrappers of
  // torch.func have no storage.
  return is_traced || !tensor.has_storage() || tensor.numel() == 0 ||
         storage_of(tensor).data() != nullptr;
}

void check_memory(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(has_memory(tensor), op, ": ", argument,
                    ": its storage is empty (freed, or resized to 0)");
}

void check_memory(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(has_memory(tensor), op, ": ", list, "[", index,
                    "]: its storage is empty (freed, or resized to 0)");
}

void check_no_overlap(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": ", list, "[",
                    index,
                    "]: more than one element refers to the same memory location, so the "
                    "tensor cannot be written; clone() it first");
}

bool is_lazy_clone(const at::Tensor& tensor) {
  return c10::impl::cow::is_cow_data_ptr(storage_of(tensor).data_ptr());
}

void check_strided(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op, ": ", argument,
                    ": expected a strided tensor, got layout ", tensor.layout());
}

void resolve_conjugate_grad(const at::Tensor& parameter) {
  if (parameter.grad().is_conj()) parameter.mutable_grad() = parameter.grad().resolve_conj();
}

bool is_aligned(const at::Tensor& tensor) {
  const uintptr_t below_size = c10::elementSize(tensor.scalar_type()) - 1;  // sizes are 2ⁿ
  return (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & below_size) == 0;
}

void check_tensors(const char* op, at::TensorList tensors) {
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    check_tensor(op, i, tensor, tensors[0]);
  });
}

void check_writable_tensors(const char* op, at::TensorList tensors) {
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    check_writable(op, i, tensor, tensors[0]);
  });
}

const void* written_storage(const at::Tensor& tensor) {
  return tensor.numel() == 0 || is_lazy_clone(tensor) ? nullptr : storage_of(tensor).data();
}

void check_disjoint(const char* op, const char* list, const std::vector<const void*>& storages,
                    const std::function<const at::Tensor&(size_t)>& tensor) {
  constexpr size_t kListed = SIZE_MAX;  // replaces the index of a tensor that `sharing` contains
  ska::flat_hash_map<const void*, size_t> first_of;
  first_of.reserve(storages.size());
  std::vector<Extent> sharing;
  for (size_t i = 0; i < storages.size(); ++i) {
    if (storages[i] == nullptr) continue;
    auto& first = first_of.emplace(storages[i], i).first->second;
    if (first == i) continue;
    if (first != kListed) sharing.push_back(extent_of(tensor(first), first));
    first = kListed;
    sharing.push_back(extent_of(tensor(i), i));
  }
  std::ranges::sort(
      sharing, {}, [](const Extent& extent) { return std::make_pair(extent.begin, extent.index); });
  const Extent* last = nullptr;
  const Extent* last_dense = nullptr;
  for (const Extent& next : sharing) {
    if (last != nullptr && last->begin == next.begin) refuse_pair(op, list, *last, next);
    if (last_dense != nullptr && next.begin < last_dense->end) {
      refuse_pair(op, list, *last_dense, next);
    }
    if (next.is_dense) last_dense = &next;
    last = &next;
  }
}

void check_scalar(const char* op, const char* argument, const at::Tensor& scalar,
                  std::initializer_list<at::ScalarType> dtypes, at::TensorList tensors,
                  const char* list) {
  TORCH_CHECK_TYPE(scalar.defined(), op, ": ", argument, ": expected a tensor, got none");
  check_strided(op, argument, scalar);
  TORCH_CHECK_VALUE(scalar.sym_numel() == 1, op, ": ", argument,
                    ": expected a tensor with one element, got shape ", scalar.sym_sizes());
  check_memory(op, argument, scalar);
  bool is_listed = false;
  std::string names;
  for (const at::ScalarType dtype : dtypes) {
    is_listed = is_listed || scalar.scalar_type() == dtype;
    names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  }
  TORCH_CHECK_TYPE(is_listed, op, ": ", argument, ": expected dtype ", names, ", got ",
                   dtype_name(scalar.scalar_type()));
  TORCH_CHECK_VALUE(tensors.empty() || scalar.device() == tensors[0].device(), op, ": ", argument,
                    ": expected device ", tensors.empty() ? scalar.device() : tensors[0].device(),
                    ", that of ", list, "[0], got ", scalar.device());
}

void refuse_backend(const char* op, at::TensorList tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": no kernel for device ",
                              tensors.empty() ? c10::Device(at::kCPU) : tensors[0].device(),
                              " in this build of ampfuse");
}

at::ScalarType norm_dtype(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (c10::toRealValueType(tensor.scalar_type()) == at::kDouble) return at::kDouble;
  }
  return at::kFloat;
}

DenseRuns::DenseRuns(const char* op, at::TensorList tensors, ComplexAs complex, Use use)
    : runs_(tensors.size()) {
  const bool is_written = use == Use::kWrite;
  std::vector<const void*> storages(is_written ? tensors.size() : 0);
  bool complete = true;
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    is_written ? check_writable(op, i, tensor, tensors[0])
               : check_tensor(op, i, tensor, tensors[0]);
    check_memory(op, "tensors", i, tensor);
    if (is_written) storages[i] = written_storage(tensor);
    const bool needs_own_memory = !tensor.is_non_overlapping_and_dense() || !is_aligned(tensor) ||
                                  (is_written && is_lazy_clone(tensor));
    if (needs_own_memory) complete = false;
    // TensorRun has one pointer type, for memory that is written and for memory that is only read.
    void* const data = needs_own_memory ? nullptr : const_cast<void*>(tensor.const_data_ptr());
    runs_[i] = as_run(tensor, data, complex);
  });
  for (size_t i = 0; i < tensors.size() && !complete; ++i) {
    if (runs_[i].data != nullptr || runs_[i].size == 0) continue;
    at::Tensor dense = tensors[i];
    if (is_written && storages[i] == nullptr) {  // a lazy clone gets its own memory now
      dense.mutable_data_ptr();
      storages[i] = written_storage(dense);
    }
    if (!dense.is_non_overlapping_and_dense() || !is_aligned(dense)) {
      // Copy complex tensors as real ones: for complex doubles torch uses instructions that crash
      // on misaligned addresses.
      const at::Tensor original = dense.is_complex() ? at::view_as_real(dense) : dense;
      dense = original.clone(at::MemoryFormat::Contiguous);
      copied_.emplace_back(original, dense);
    }
    runs_[i].data = dense.mutable_data_ptr();
  }
  if (is_written) {
    check_disjoint(op, "tensors", storages,
                   [&](size_t i) -> const at::Tensor& { return tensors[i]; });
  }
}

void DenseRuns::write_back() const {
  for (const auto& [original, copy] : copied_) original.copy_(copy);
}

}  // namespace ampfuse
