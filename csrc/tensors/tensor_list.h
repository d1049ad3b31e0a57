// What the multi-tensor ops ask of their arguments, checked in one place for every backend, and
// what lets kernels see only dense, distinct tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace ampfuse {

/// Refuses a tensor that is undefined or not strided. `list` and `index`, here and below, are where
/// messages say it stands.
void check_strided(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// Refuses a tensor on another device than the first of the list named `first_list`.
void check_device(const char* op, const char* list, size_t index, const at::Tensor& tensor,
                  const char* first_list, const at::Tensor& first);

/// False for a tensor whose memory was given back.
bool has_memory(const at::Tensor& tensor);

/// Refuses a tensor whose memory was given back (FSDP1 resizes storages to nothing, say).
void check_allocated(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// Refuses a tensor that overlaps itself (an expanded one, say).
void check_no_overlap(const char* op, const char* list, size_t index, const at::Tensor& tensor);

/// Whether it gets memory of its own when it is written, which is not to happen on many threads.
bool is_lazy_clone(const at::Tensor& tensor);

/// Whether its elements lie at multiples of their size. Those that came through DLPack, from_blob
/// or frombuffer may not, complex ones already at multiples of half their size.
bool is_aligned(const at::Tensor& tensor);

/// Refuses a list whose tensors are undefined, not strided, of a dtype the kernels lack or not on
/// the first tensor's device, naming the index.
void check_tensors(const char* op, at::TensorList tensors);

/// check_tensors, and refuses tensors that overlap themselves (expanded ones, say).
void check_writable_tensors(const char* op, at::TensorList tensors);

/// The memory that a tensor will be written in: the start of its storage. Null for one without
/// elements, and for a lazy clone, whose storage is not its own until it is written.
const void* written_storage(const at::Tensor& tensor);

/// Refuses a list of which two tensors share memory: parallel kernels would lose what one of them
/// writes there. `storages` are those of the list's tensors, of which `tensor(index)` is one.
///
/// Compared are tensors of one storage. A tensor that leaves gaps may lie between the elements of
/// another, so that of these only two are refused: one that begins inside a dense tensor, and one
/// of several that begin at the same element. Who passes strided tensors that overlap otherwise, or
/// storages laid over each other (torch.from_numpy of overlapping arrays), gets wrong products.
void check_disjoint(const char* op, const char* list, const std::vector<const void*>& storages,
                    const std::function<const at::Tensor&(size_t)>& tensor);

/// Refuses anything but one element of one of `dtypes` on the device of `tensors` (any device when
/// the list is empty). `list`: what messages call them.
void check_scalar(const char* op, const char* argument, const at::Tensor& scalar,
                  std::initializer_list<at::ScalarType> dtypes, at::TensorList tensors,
                  const char* list = "tensors");

/// Refuses arguments that reached an op without a kernel for them. Sparse tensors and devices that
/// this build does not serve come to the ops' kernels for no backend in particular; those check as
/// all kernels do, which names the sparse argument, and then call this.
[[noreturn]] void refuse_backend(const char* op, at::TensorList tensors);

/// float64 if any tensor is double or complex double, else float32.
at::ScalarType norm_dtype(at::TensorList tensors);

/// A dense tensor as kernels see it.
struct TensorRun {
  void* data;
  int64_t size;  // in elements of dtype
  at::ScalarType dtype;

  void* at(int64_t element) const {
    return static_cast<char*>(data) + element * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

/// Whether complex tensors are taken as they are or as twice as many real numbers.
enum class Complex { kWhole, kAsReal };

enum class Use { kRead, kWrite };

/// A list as runs of memory, with contiguous copies in the place of strided and misaligned tensors.
/// Dense ones, in whatever order of dimensions, are taken as they are: the ops do not care for the
/// order of elements.
///
/// Checks the list as check_tensors does, or for writing as check_writable_tensors does, and that
/// tensors which are written share no memory: all in the one pass that reads their headers, which
/// is most of what an op on thousands of small tensors costs the host.
class DenseRuns {
 public:
  DenseRuns(const char* op, at::TensorList tensors, Complex complex, Use use);

  const std::vector<TensorRun>& get() const { return runs_; }

  /// Copies the stand-ins back to where they came from.
  void write_back() const;

 private:
  std::vector<TensorRun> runs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copied_;  // the original, its stand-in
};

}  // namespace ampfuse
