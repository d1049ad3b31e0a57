#include "tensor_list.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/flat_hash_map.h>

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

void check_no_overlap(const char* op, const char* list, size_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": ", list, "[",
                    index,
                    "]: more than one element refers to the same memory location, so it "
                    "can't be written; clone() it first");
}

bool is_aligned(const at::Tensor& tensor) {
  const uintptr_t below_size = c10::elementSize(tensor.scalar_type()) - 1;  // a power of two
  return (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & below_size) == 0;
}

void check_tensors(const char* op, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_strided(op, "tensors", i, tensors[i]);
    TORCH_CHECK_TYPE(is_supported(tensors[i].scalar_type()), op, ": tensors[", i,
                     "]: expected a floating-point or complex tensor (half, bfloat16, float, "
                     "double, complex float or complex double), got dtype ",
                     tensors[i].scalar_type());
    check_device(op, "tensors", i, tensors[i], "tensors", tensors[0]);
  }
}

void check_writable_tensors(const char* op, at::TensorList tensors) {
  check_tensors(op, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) check_no_overlap(op, "tensors", i, tensors[i]);
}

void check_distinct(const char* op, at::TensorList tensors) {
  ska::flat_hash_map<const void*, size_t> seen;
  seen.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    // The address it will be written at: a lazy clone shares its original's until then.
    const auto [first, fresh] = seen.emplace(tensors[i].mutable_data_ptr(), i);
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

std::vector<TensorRun> readable_runs(at::TensorList dense, Complex complex) {
  std::vector<TensorRun> runs;
  runs.reserve(dense.size());
  for (const at::Tensor& tensor : dense) {
    // The run is only read, but a run that is written has the same type.
    runs.push_back(as_run(tensor, const_cast<void*>(tensor.const_data_ptr()), complex));
  }
  return runs;
}

std::vector<TensorRun> writable_runs(at::TensorList dense, Complex complex) {
  std::vector<TensorRun> runs;
  runs.reserve(dense.size());
  for (const at::Tensor& tensor : dense) {
    runs.push_back(as_run(tensor, tensor.mutable_data_ptr(), complex));
  }
  return runs;
}

DenseTensors::DenseTensors(std::vector<at::Tensor> tensors) : dense_(std::move(tensors)) {
  for (size_t i = 0; i < dense_.size(); ++i) {
    if (dense_[i].is_non_overlapping_and_dense() && is_aligned(dense_[i])) continue;
    copied_.emplace_back(dense_[i], i);
    dense_[i] = dense_[i].clone(at::MemoryFormat::Contiguous);
  }
}

void DenseTensors::write_back() const {
  for (const auto& [original, place] : copied_) original.copy_(dense_[place]);
}

std::vector<std::vector<at::Tensor>> distinct_rounds(at::TensorList tensors) {
  std::vector<std::vector<at::Tensor>> rounds(1);
  rounds[0].reserve(tensors.size());
  ska::flat_hash_map<const void*, size_t> mentions;
  mentions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const size_t round = mentions[tensor.const_data_ptr()]++;
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(tensor);
  }
  return rounds;
}

}  // namespace ampfuse
