// Index of the largest logit of a row.
#include <bit>

#include "cross_entropy.h"
#include "cross_entropy_logits.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// Returns the index of the first logit for which is(x) is true, or -1.
template <typename scalar_t, typename Is>
int64_t first_that(const Logits& logits, const Is& is) {
  using Vec = AccVec<scalar_t>;
  const auto* const x = static_cast<const scalar_t*>(logits.data);
  constexpr auto kAll = static_cast<uint32_t>((uint64_t{1} << Vec::size()) - 1);
  for (int64_t i = 0; i < logits.count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), logits.count - i);
    // The mask is(x) is NaN in lanes where it is true, and 0 elsewhere.
    const auto elsewhere = static_cast<uint32_t>(is(load_one(x + i, rest)).zero_mask());
    const int64_t lane = std::countr_one(elsewhere & kAll);
    if (lane < rest) return i + lane;
  }
  return -1;
}

template <typename scalar_t>
int64_t argmax_of(const Logits& logits) {
  using Vec = AccVec<scalar_t>;
  const int64_t nan = first_that<scalar_t>(logits, [](const Vec& x) { return x != x; });
  if (nan >= 0) return nan;
  const Vec largest(largest_logit<scalar_t>(logits));
  return first_that<scalar_t>(logits, [&](const Vec& x) { return x == largest; });
}

}  // namespace

int64_t row_argmax(const Logits& logits) {
  return with_logit_type(logits.dtype,
                         [&]<typename scalar_t>() { return argmax_of<scalar_t>(logits); });
}

}  // namespace ampfuse::CPU_CAPABILITY
