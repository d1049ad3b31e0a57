// Checks the tensor lists of multi-tensor ops, in one place for every backend, and turns them into
// runs of dense memory for kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "tensor_run.h"

namespace ampfuse {

/// Throws for a tensor that is undefined or not strided. Here and below, `list` and `index` are the
/// tensor's list and its index there, for messages.
void check_strided(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// Throws unless the tensor is on the device of `first`, the first tensor of the list `first_list`.
void check_device(const char* op, const char* list, size_t index, const at::Tensor& tensor,
                  const char* first_list, const at::Tensor& first);

/// False for a tensor whose storage was freed.
bool has_memory(const at::Tensor& tensor);

/// Throws for a sparse tensor, or one of another layout that is not strided.
void check_strided(const char* op, const char* argument, const at::Tensor& tensor);

/// Throws for a tensor whose storage was freed. For example, FSDP1 resizes storages to 0.
void check_memory(const char* op, const char* argument, const at::Tensor& tensor);
void check_memory(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// Throws for a tensor that overlaps itself, for example an expanded one.
void check_no_overlap(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// True for a copy-on-write clone. Its first write allocates its own memory, which must not happen
/// on several threads.
bool is_lazy_clone(const at::Tensor& tensor);

/// True if the tensor's address is a multiple of its element size. Tensors from DLPack, from_blob
/// or frombuffer may be misaligned. A complex tensor may be aligned for its real numbers only.
bool is_aligned(const at::Tensor& tensor);

/// Replaces a gradient that is a conjugate view, which no operator writes, by a tensor of its own.
/// Autograd makes such gradients of complex parameters.
void resolve_conjugate_grad(const at::Tensor& parameter);

/// Throws, naming the index, unless all tensors are defined, strided, of a dtype that kernels
/// support, and on the device of the first.
void check_tensors(const char* op, at::TensorList tensors);

/// Checks as check_tensors() does, and throws for tensors that overlap themselves.
void check_writable_tensors(const char* op, at::TensorList tensors);

/// Returns the start of the storage that a write to the tensor will change. Null for a tensor
/// without elements, and for a lazy clone, which gets its own storage only when it is written.
const void* written_storage(const at::Tensor& tensor);

/// Throws if two tensors of a list share memory: of two parallel writes to it, one would be lost.
/// `storages` are the written_storage() of each tensor; `tensor(index)` returns a tensor of the
/// list.
///
/// Only tensors of one storage are compared. A tensor with gaps may lie between the elements of
/// another, so a pair with gaps is refused only if one begins inside a dense tensor, or if both
/// begin at the same element. Other overlaps of strided tensors, and storages laid over each other
/// (torch.from_numpy of overlapping arrays), are not detected and give wrong results.
void check_disjoint(const char* op, const char* list, const std::vector<const void*>& storages,
                    const std::function<const at::Tensor&(size_t)>& tensor);

/// Throws unless `scalar` is one element of one of `dtypes` on the device of `tensors` (on any
/// device if the list is empty). `list` is the name of `tensors` in messages.
void check_scalar(const char* op, const char* argument, const at::Tensor& scalar,
                  std::initializer_list<at::ScalarType> dtypes, at::TensorList tensors,
                  const char* list = "tensors");

/// Throws for tensors for which an op has no kernel. The dispatcher passes sparse tensors, and
/// tensors on a device that this build does not support, to the op's kernel for all other backends.
/// The other kernel checks the arguments before it calls this function, so that the error for a
/// sparse tensor names the argument.
[[noreturn]] void refuse_backend(const char* op, at::TensorList tensors);

/// Returns float64 if any tensor is double or complex double, else float32.
at::ScalarType norm_dtype(at::TensorList tensors);

/// How kernels see complex tensors: as they are, or as twice as many real numbers.
enum class ComplexAs { kComplex, kRealPairs };

enum class Use { kRead, kWrite };

/// A tensor list as runs of memory. Tensors with gaps and misaligned ones are replaced by
/// contiguous copies. Dense tensors are used in place, whatever the order of their dimensions: the
/// ops do not depend on the order of elements.
///
/// The constructor checks the list as check_tensors() does, or for writing as
/// check_writable_tensors() does, and that written tensors share no memory. One pass over the
/// tensors' headers does all of this, and is most of the host time of an op on thousands of small
/// tensors.
class DenseRuns {
 public:
  DenseRuns(const char* op, at::TensorList tensors, ComplexAs complex, Use use);

  const std::vector<TensorRun>& get() const { return runs_; }

  /// Copies the contiguous copies back to the tensors that they replace.
  void write_back() const;

 private:
  std::vector<TensorRun> runs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copied_;  // original, copy
};

}  // namespace ampfuse
