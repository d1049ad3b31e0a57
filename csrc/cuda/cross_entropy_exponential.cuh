// exp(z − reference) of a row's logits on a device, and the gradient that is made of it. The
// reference is the row's largest z so far, or near it.
#pragma once

#include <cmath>
#include <type_traits>

#include "../math/cross_entropy.h"
#include "../math/cross_entropy_exponential.h"

namespace ampfuse {

// What logits are computed with.
template <typename scalar_t>
using RowAcc = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// What a row's few numbers are computed with: gradients of fp32 logits have as many digits as they.
// Not double for 16-bit ones, which most GPUs have an order of magnitude fewer units for.
template <typename scalar_t>
using RowNumber = std::conditional_t<sizeof(scalar_t) == 2, float, double>;

// 2^x by the device's own instruction, off by 2 ulps; what would be subnormal is 0. exp2f() keeps
// that by three instructions more.
__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return x < -126 ? 0 : std::exp2(x);
#endif
}

// 16-bit logits take the device's own power of two, with which two exponentials per logit cost less
// than moving its 4 bytes.
template <typename scalar_t>
class RowExponential {
 public:
  using Term = float;
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(float largest) : largest_(largest) {}
  __device__ double reference() const { return largest_; }

  // For sums, off by 2 ulps and |z − largest| / 20. The product with 1/log 2 is rounded, which
  // alone would cost up to |z − largest| / 2 of them, so what it has lost is multiplied in.
  __device__ float term(float z) const {
    const float d = fmaxf(z - largest_, -200.0f);  // exp(−∞) has no such remainder
    const float power = d * kPerLog2;
    const float lost = std::fma(power, -kLog2, d);
    const float e = power_of_two(power);
    return std::fma(e, lost, e);
  }

  // exp(earlier reference − this one).
  __device__ double from(float earlier) const { return term(earlier); }

  // Exponentials are biased as in math/exponential.h and for its reason, which the factor undoes.
  // Not where it is so small that it would lose digits: subnormal ones times it are 0 then.
  struct Factor {
    float factor;
    float bias;
    __device__ explicit Factor(float by) {
      const bool is_small = std::fabs(by) < math::kSmallestUnbiased;
      bias = is_small ? 0 : math::kExponentBias;
      factor = is_small ? by : by * static_cast<float>(math::kUnbias);
    }
  };
  // For gradients, which are rounded to 11 bits or 8.
  __device__ float times(float z, const Factor& by) const {
    const float power = power_of_two(std::fma(z - largest_, kPerLog2, by.bias));
    return math::Lane<float>::product(power, by.factor);
  }

 private:
  static constexpr float kLog2 = 0.693147181f;
  static constexpr float kPerLog2 = 1.44269502f;

  float largest_;
};

// math/exponential.h for fp32 logits, so that their gradient's last digit is right.
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
