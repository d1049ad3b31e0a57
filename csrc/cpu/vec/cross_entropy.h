#pragma once

#include <c10/core/ScalarType.h>

#include "../../math/cross_entropy.h"
#include "../capability.h"

namespace ampfuse {

/// Classes of a row are taken this many at a time, whatever the number of threads: 8 KiB of fp32,
/// which stay in the first cache from one pass over them to the next.
inline constexpr int64_t kClassBlock = 2048;

/// Consecutive logits of a row, at most kClassBlock. Arithmetic is in double for double logits,
/// else in fp32.
struct Logits {
  const void* data;
  c10::ScalarType dtype;
  int64_t count;
  int64_t target;  // the place of the row's own target among them, or -1
  double softcap;  // 0: none
};

/// What these classes weigh in the loss: weight · (of_probability·probability + uniform).
struct ClassShares {
  const void* weight = nullptr;  // in the type of the arithmetic; null: 1 for all
  const void* probabilities = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the probabilities
  double of_probability = 0;
  double uniform = 0;

  AMPFUSE_HOST_DEVICE bool any() const { return probabilities != nullptr || uniform != 0; }
};

/// How many numbers of the arithmetic's type the exponentials of a block take: those of fp32 logits
/// are sums of two.
constexpr int64_t kExponentials = 2 * kClassBlock;

/// Reads logits, tells what they are, and leaves exp(z - the part's reference), 0 for the target,
/// in `exponentials`.
AMPFUSE_PER_CAPABILITY(math::RowPart<double> row_part(const Logits& logits,
                                                      const ClassShares& shares, bool with_entropy,
                                                      void* exponentials))

/// The place of the first largest of them; a NaN is larger than all numbers.
AMPFUSE_PER_CAPABILITY(int64_t row_argmax(const Logits& logits))

/// The same exponentials for a row whose largest z is known.
AMPFUSE_PER_CAPABILITY(void row_exponentials(const Logits& logits, double largest,
                                             void* exponentials))

/// What exponentials of logits of this dtype are relative to.
AMPFUSE_PER_CAPABILITY(double row_reference(c10::ScalarType dtype, double largest))

/// Writes the gradient, of the logits' dtype or for float logits also of 16 bits, which may be
/// where the logits are if it is of their dtype; of the target's, `of_target`. `of_exponential` is
/// for the exponentials as they are.
AMPFUSE_PER_CAPABILITY(void row_gradient(const Logits& logits, const ClassShares& shares,
                                         const void* exponentials,
                                         const math::RowGradient<double>& gradient, void* out,
                                         c10::ScalarType out_dtype))

}  // namespace ampfuse
