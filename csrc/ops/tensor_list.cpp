#include "tensor_list.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/COW.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>

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
  TORCH_CHECK_TYPE(is_supported(tensor.scalar_type()), op, ": tensors[", index,
                   "]: expected a floating-point or complex tensor (half, bfloat16, float, "
                   "double, complex float or complex double), got dtype ",
                   tensor.scalar_type());
  check_device(op, "tensors", index, tensor, "tensors", first);
}

// Where tensors will be written: a lazy clone shares its original's address until then. Null where
// there are no elements.
std::vector<const void*> written_addresses(at::TensorList tensors) {
  std::vector<const void*> addresses(tensors.size());
  std::vector<char> is_lazy(tensors.size());
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    is_lazy[i] = is_lazy_clone(tensor);
    addresses[i] = tensor.const_data_ptr();
  });
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_lazy[i]) addresses[i] = tensors[i].mutable_data_ptr();
  }
  return addresses;
}

TensorRun as_run(const at::Tensor& dense, void* data, Complex complex) {
  const at::ScalarType dtype = dense.scalar_type();
  if (complex == Complex::kAsReal && c10::isComplexType(dtype)) {
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
                    "]: expected device ", first.device(), " as ", first_list, "[0], got ",
                    tensor.device());
}

void check_allocated(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, op, ": ", list, "[",
                    index, "]: expected a tensor with memory, got one whose storage has none");
}

void check_no_overlap(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": ", list, "[",
                    index,
                    "]: more than one element refers to the same memory location, so it "
                    "can't be written; clone() it first");
}

bool is_lazy_clone(const at::Tensor& tensor) {
  return c10::impl::cow::is_cow_data_ptr(tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr());
}

bool is_aligned(const at::Tensor& tensor) {
  const uintptr_t below_size = c10::elementSize(tensor.scalar_type()) - 1;  // a power of two
  return (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & below_size) == 0;
}

void check_tensors(const char* op, at::TensorList tensors) {
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    check_tensor(op, i, tensor, tensors[0]);
  });
}

void check_writable_tensors(const char* op, at::TensorList tensors) {
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    check_tensor(op, i, tensor, tensors[0]);
    check_no_overlap(op, "tensors", i, tensor);
  });
}

void check_distinct(const char* op, at::TensorList tensors) {
  const std::vector<const void*> addresses = written_addresses(tensors);
  ska::flat_hash_map<const void*, size_t> seen;
  seen.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (addresses[i] == nullptr) continue;
    const auto [first, fresh] = seen.emplace(addresses[i], i);
    TORCH_CHECK_VALUE(fresh, op, ": tensors[", i, "]: expected distinct tensors, got tensors[",
                      first->second, "] again");
  }
}

void check_scalar(const char* op, const char* argument, const at::Tensor& scalar,
                  std::initializer_list<at::ScalarType> dtypes, at::TensorList tensors,
                  const char* list) {
  TORCH_CHECK_TYPE(scalar.defined(), op, ": ", argument, ": expected a tensor, got none");
  TORCH_CHECK_VALUE(scalar.layout() == at::kStrided, op, ": ", argument,
                    ": expected a strided tensor, got layout ", scalar.layout());
  TORCH_CHECK_VALUE(scalar.sym_numel() == 1, op, ": ", argument,
                    ": expected a tensor with one element, got shape ", scalar.sym_sizes());
  bool listed = false;
  for (const at::ScalarType dtype : dtypes) listed = listed || scalar.scalar_type() == dtype;
  TORCH_CHECK_TYPE(listed, op, ": ", argument, ": expected dtype ",
                   c10::Join(" or ", std::vector<at::ScalarType>(dtypes)), ", got ",
                   scalar.scalar_type());
  TORCH_CHECK_VALUE(tensors.empty() || scalar.device() == tensors[0].device(), op, ": ", argument,
                    ": expected device ", tensors.empty() ? scalar.device() : tensors[0].device(),
                    " as ", list, "[0], got ", scalar.device());
}

void refuse_backend(const char* op, at::TensorList tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": tensors: no kernel for device ",
                              tensors.empty() ? c10::Device(at::kCPU) : tensors[0].device(),
                              " in this build of ampfuse");
}

at::ScalarType norm_dtype(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (c10::toRealValueType(tensor.scalar_type()) == at::kDouble) return at::kDouble;
  }
  return at::kFloat;
}

DenseRuns::DenseRuns(const char* op, at::TensorList tensors, Complex complex, Use use)
    : runs_(tensors.size()) {
  std::atomic<bool> complete = true;
  for_each_tensor(tensors, [&](size_t i, const at::Tensor& tensor) {
    check_allocated(op, "tensors", i, tensor);
    const bool takes_more = !tensor.is_non_overlapping_and_dense() || !is_aligned(tensor) ||
                            (use == Use::kWrite && is_lazy_clone(tensor));
    if (takes_more) complete = false;
    // A run that is only read has the same type as one that is written.
    void* const data = takes_more ? nullptr : const_cast<void*>(tensor.const_data_ptr());
    runs_[i] = as_run(tensor, data, complex);
  });
  for (size_t i = 0; i < tensors.size() && !complete; ++i) {
    if (runs_[i].data != nullptr || runs_[i].size == 0) continue;
    at::Tensor dense = tensors[i];
    if (!dense.is_non_overlapping_and_dense() || !is_aligned(dense)) {
      dense = dense.clone(at::MemoryFormat::Contiguous);
      copied_.emplace_back(tensors[i], dense);
    }
    runs_[i].data = dense.mutable_data_ptr();
  }
}

void DenseRuns::write_back() const {
  for (const auto& [original, copy] : copied_) original.copy_(copy);
}

void for_each_distinct(at::TensorList tensors, const std::function<void(at::TensorList)>& visit) {
  const std::vector<const void*> addresses = written_addresses(tensors);
  std::vector<size_t> round_of(tensors.size());
  size_t rounds = 1;
  ska::flat_hash_map<const void*, size_t> mentions;
  mentions.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (addresses[i] == nullptr) continue;
    round_of[i] = mentions[addresses[i]]++;
    rounds = std::max(rounds, round_of[i] + 1);
  }
  if (rounds == 1) return visit(tensors);
  for (size_t round = 0; round < rounds; ++round) {
    std::vector<at::Tensor> distinct;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (addresses[i] != nullptr && round_of[i] == round) distinct.push_back(tensors[i]);
    }
    visit(distinct);
  }
}

}  // namespace ampfuse
