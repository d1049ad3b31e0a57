// exp(z − reference) of a row's logits on the GPU, for sums and for gradients. The reference is the
// largest z of the row so far, or near it.
#pragma once

#include <cmath>
#include <type_traits>

#include "../math/cross_entropy.h"
#include "../math/cross_entropy_exponential.h"

namespace ampfuse {

// The type in which logits are processed.
template <typename scalar_t>
using RowAcc = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// The type of the few numbers per row. It is double for fp32 logits, so that their gradients have
// all digits of fp32. It is float for 16-bit logits, since most GPUs have an order of magnitude
// fewer double-precision units.
template <typename scalar_t>
using RowNumber = std::conditional_t<sizeof(scalar_t) == 2, float, double>;

// Returns 2^x from a single instruction with an error of 2 ulps. Subnormal results become 0;
// exp2f() keeps them at the cost of three more instructions.
__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return x < -126 ? 0 : std::exp2(x);
#endif
}

// The version for 16-bit logits uses power_of_two: two such exponentials per logit take less time
// than reading its 2 bytes and writing 2.
template <typename scalar_t>
class RowExponential {
 public:
  using Term = float;
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(float largest) : largest_(largest) {}
  __device__ double reference() const { return largest_; }

  // Returns exp(z − largest) for sums, with an error of 2 + |z − largest| / 20 ulps. Rounding the
  // product with 1/log 2 alone would cost up to |z − largest| / 2 ulps, so the result is corrected
  // by the part that rounding lost.
  __device__ float term(float z) const {
    const float d = fmaxf(z - largest_, -200.0f);  // for −∞, `lost` would be NaN
    const float power = d * kPerLog2;
    const float lost = std::fma(power, -kLog2, d);
    const float e = power_of_two(power);
    return std::fma(e, lost, e);
  }

  // Returns exp(earlier reference − this one).
  __device__ double from(float earlier) const { return term(earlier); }

  // A factor for exponentials. They are biased as in math/cross_entropy_exponential.h, for the same
  // reason, and the factor removes the bias. A factor so small that it would lose digits is used
  // without a bias: its product with a subnormal exponential is 0 anyway.
  struct Factor {
    float factor;
    float bias;
    __device__ explicit Factor(float by) {
      const bool is_small = std::fabs(by) < math::kSmallestUnbiased;
      bias = is_small ? 0 : math::kExponentBias;
      factor = is_small ? by : by * static_cast<float>(math::kUnbias);
    }
  };
  // Returns exp(z − largest)·factor for gradients, which are rounded to 11 bits (fp16) or 8
  // (bfloat16) afterwards.
  __device__ float times(float z, const Factor& by) const {
    const float power = power_of_two(std::fma(z - largest_, kPerLog2, by.bias));
    return math::Lane<float>::product(power, by.factor);
  }

 private:
  static constexpr float kLog2 = 0.693147181f;
  static constexpr float kPerLog2 = 1.44269502f;

  float largest_;
};

// The version for fp32 logits uses math/cross_entropy_exponential.h, so that the last digit of
// their gradient is right.
template <>
class RowExponential<float> {
 public:
  using Term = double;
  static constexpr double kUnbias = math::kUnbias;

  __device__ explicit RowExponential(float largest) : at_(math::exp_reference(largest)) {}
  __device__ double reference() const { return at_.value(); }

  __device__ double term(float z) const {
    const math::InTwo<float> e = math::biased_exp_in_two(z, at_);
    return static_cast<double>(e.high) + e.low;
  }

  __device__ double from(float earlier) const {
    const double below = reference() - RowExponential(earlier).reference();
    return below == 0 ? 1 : std::exp(-below);
  }

  struct Factor : math::BiasedFactor {
    __device__ explicit Factor(double factor) : math::BiasedFactor(math::biased_factor(factor)) {}
  };
  __device__ float times(float z, const Factor& by) const {
    return by.times(math::biased_exp_in_two(z, at_));
  }

 private:
  math::ExpReference at_;
};

template <>
class RowExponential<double> {
 public:
  using Term = double;
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(double largest) : largest_(largest) {}
  __device__ double reference() const { return largest_; }
  __device__ double term(double z) const { return std::exp(z - largest_); }
  __device__ double from(double earlier) const { return term(earlier); }

  struct Factor {
    double factor;
    __device__ explicit Factor(double factor) : factor(factor) {}
  };
  __device__ double times(double z, const Factor& by) const { return term(z) * by.factor; }

 private:
  double largest_;
};

}  // namespace ampfuse
