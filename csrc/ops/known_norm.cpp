#include "known_norm.h"

#include <algorithm>
#include <atomic>
#include <deque>

#include "capture.h"

namespace ampfuse {

namespace {

using Impls = c10::ArrayRef<c10::TensorImpl*>;

// A weak pointer keeps an address from being given to another.
template <typename Impl, typename Null>
c10::weak_intrusive_ptr<Impl, Null> weak(Impl* impl) {
  return c10::weak_intrusive_ptr<Impl, Null>::reclaim(c10::raw::intrusive_ptr::make_weak(impl));
}

c10::StorageImpl* storage_of(const c10::TensorImpl* tensor) {
  return tensor->unsafe_storage().unsafeGetStorageImpl();
}

// By which tensors are known again, if nobody has written them since.
class Stamp {
 public:
  explicit Stamp(Impls tensors) {
    stamped_.reserve(tensors.size());
    for (c10::TensorImpl* tensor : tensors) {
      stamped_.push_back({weak<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor), tensor,
                          weak<c10::StorageImpl, NoStorage>(storage_of(tensor)), extent(tensor)});
    }
  }

  bool matches(Impls tensors) {
    if (tensors.size() != stamped_.size()) return false;
    if (is_of(tensors)) return is_unchanged();
    // Groups of parameters may be in another order than the model's. From here on by address.
    const auto address = [](const Stamped& stamped) { return stamped.tensor; };
    std::ranges::sort(stamped_, {}, address);
    std::vector<c10::TensorImpl*> sorted = tensors.vec();
    std::ranges::sort(sorted);
    return is_of(sorted) && is_unchanged();
  }

 private:
  using NoStorage = c10::detail::intrusive_target_default_null_type<c10::StorageImpl>;

  // Which elements of which memory a tensor has, as of which version. It has no gaps.
  struct Extent {
    const c10::StorageImpl* storage;
    int64_t offset;
    int64_t count;
    uint32_t version;
    bool operator==(const Extent&) const = default;
  };
  struct Stamped {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> keeps_tensors_address;
    const c10::TensorImpl* tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl, NoStorage> keeps_storages_address;
    Extent extent;
  };

  static Extent extent(const c10::TensorImpl* tensor) {
    return {storage_of(tensor), tensor->storage_offset(), tensor->numel(),
            tensor->version_counter().current_version()};
  }

  bool is_of(Impls tensors) const {
    return std::ranges::equal(stamped_, tensors, {}, &Stamped::tensor);
  }

  // Of tensors that are there, since somebody has just shown them.
  bool is_unchanged() const {
    return std::ranges::all_of(
        stamped_, [](const Stamped& stamped) { return stamped.extent == extent(stamped.tensor); });
  }

  std::vector<Stamped> stamped_;
};

struct KnownNorm {
  Stamp stamp;
  at::Tensor norm;
  at::ScalarType dtype;  // that multi_tensor_norm gives it
  bool was_captured;
  uint64_t age;
};

constexpr size_t kKnown = 4;                     // one for each of some optimizers
thread_local std::deque<KnownNorm> known_norms;  // the last first
std::atomic<uint64_t> age = 0;                   // moved on by whoever may have written unseen

// What happens to this tensor now.
bool is_captured(const at::Tensor& tensor) {
  return tensor.is_cuda() && is_capturing();
}

// Tensors of inference mode do not count how often they are written.
bool can_be_stamped(Impls tensors) {
  return std::ranges::all_of(tensors, [](const auto* tensor) {
    return tensor->version_counter().enabled() && tensor->has_storage() &&
           tensor->is_non_overlapping_and_dense();
  });
}

at::ScalarType norm_dtype(Impls tensors) {
  const bool any_double = std::ranges::any_of(tensors, [](const auto* tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor->dtype());
    return dtype == at::kDouble || dtype == at::kComplexDouble;
  });
  return any_double ? at::kDouble : at::kFloat;
}

std::vector<c10::TensorImpl*> impls(at::TensorList tensors) {
  std::vector<c10::TensorImpl*> impls;
  impls.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) impls.push_back(tensor.unsafeGetTensorImpl());
  return impls;
}

}  // namespace

void remember_norm(Impls tensors, const at::Tensor& norm) {
  if (!can_be_stamped(tensors)) return;
  known_norms.push_front({Stamp(tensors), norm, norm_dtype(tensors), is_captured(norm), age});
  if (known_norms.size() > kKnown) known_norms.pop_back();
}

std::optional<at::Tensor> recall_norm(Impls tensors, bool as_double) {
  while (!known_norms.empty() && known_norms.back().age != age) known_norms.pop_back();
  if (known_norms.empty() || !can_be_stamped(tensors)) return std::nullopt;
  for (KnownNorm& known : known_norms) {
    if (!known.stamp.matches(tensors) || known.was_captured != is_captured(known.norm)) continue;
    if (as_double) return known.norm;
    return known.norm.to(known.dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  return std::nullopt;
}

void forget_norms() {
  ++age;
  known_norms.clear();
}

void remember_norm(at::TensorList tensors, const at::Tensor& norm) {
  remember_norm(impls(tensors), norm);
}

std::optional<at::Tensor> recall_norm(at::TensorList tensors, bool as_double) {
  return recall_norm(impls(tensors), as_double);
}

}  // namespace ampfuse
