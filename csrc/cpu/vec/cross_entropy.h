#pragma once

#include <c10/core/ScalarType.h>

#include "../../math/cross_entropy.h"
#include "../capability.h"

namespace ampfuse {

/// The number of classes in a block of a row. It does not depend on the number of threads. A block
/// has 8 KiB of fp32, which stay in the L1 cache from one pass over them to the next.
inline constexpr int64_t kClassBlock = 2048;

/// Consecutive logits of a row, at most kClassBlock. Arithmetic is in double for double logits,
/// else in fp32.
struct Logits {
  const void* data;
  c10::ScalarType dtype;
  int64_t count;
  int64_t target;  // index of the row's target among these logits, or -1
  double softcap;  // 0: none
};

/// B of these classes (math/cross_entropy.h): weight · (of_probability · probability + uniform).
struct ClassMasses {
  const void* weight = nullptr;  // numbers of the arithmetic's type; null: 1 for all
  const void* probabilities = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // dtype of the probabilities
  double of_probability = 0;
  double uniform = 0;

  AMPFUSE_HOST_DEVICE bool any() const { return probabilities != nullptr || uniform != 0; }
};

/// Size of a block's exponentials, in numbers of the arithmetic's type. Exponentials of fp32 logits
/// are sums of two numbers.
constexpr int64_t kExponentials = 2 * kClassBlock;

/// Returns the partial results of these logits. Writes exp(z - reference) to `exponentials`, with
/// the reference of the returned RowPartial, and 0 for the target. Exponentials are biased, except
/// those of double logits (math/cross_entropy_exponential.h).
AMPFUSE_PER_CAPABILITY(math::RowPartial<double> row_partial(const Logits& logits,
                                                            const ClassMasses& masses,
                                                            bool with_entropy, void* exponentials))

/// Returns the index of the largest logit, the first one if several are equal. A NaN is larger than
/// all numbers.
AMPFUSE_PER_CAPABILITY(int64_t row_argmax(const Logits& logits))

/// Writes exponentials as row_partial does, relative to the reference of `largest`, the row's
/// largest z.
AMPFUSE_PER_CAPABILITY(void row_exponentials(const Logits& logits, double largest,
                                             void* exponentials))

/// Returns the reference of exponentials for logits of this dtype with this largest z.
AMPFUSE_PER_CAPABILITY(double row_reference(c10::ScalarType dtype, double largest))

/// Writes the gradient in the logits' dtype or, if that is float, in this or a 16-bit dtype. It may
/// overwrite the logits; a 16-bit gradient of float logits must then start where the row starts.
/// `gradient.of_exponential` multiplies exp(z - reference) without the bias. `gradient.of_target`
/// is the gradient of the target.
AMPFUSE_PER_CAPABILITY(void row_gradient(const Logits& logits, const ClassMasses& masses,
                                         const void* exponentials,
                                         const math::RowGradient<double>& gradient, void* out,
                                         c10::ScalarType out_dtype))

}  // namespace ampfuse
