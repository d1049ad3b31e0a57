// exp(z − reference) of a row's logits on the GPU, for sums and for gradients. The reference is
// near the largest z of the row or of a thread's logits, or near one logit, usually the target's
// (cross_entropy_plain.cuh).
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <c10/util/Half.h>

#include "../math/cross_entropy_exponential.h"

namespace ampfuse {

// A float logit whose exponentials are quicker and less exact: the variant quick_floats.
struct QuickFloat {
  float value;
  QuickFloat() = default;
  __device__ QuickFloat(float value) : value(value) {}
  __device__ operator float() const { return value; }
};

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

// The version for 16-bit logits takes one multiply-add and one power_of_two per exponential.
//
// exp(z − reference) is computed as 2^(z·factor − n), with one rounding before the power. `factor`
// is 1/log 2 as a float, and n is an integer: `largest` times `factor`, rounded up. So changing the
// reference of a sum multiplies the sum by a power of two, which is exact. The reference is
// n / factor, with the rounded `factor`. An exponential then has two relative errors: at most
// 2⁻²⁶·|z − reference| from the rounding of `factor`, and at most 2⁻²⁴·|z·factor − n| from the
// rounding of the exponent.
//
// Logits of 2¹⁶ and more exist only in bfloat16. Neighbouring numbers are at least 512 apart there,
// so each exponential is 0 or 1. If `largest` is that far from 0, `factor` is a power of two, so
// small that n is at most 2¹⁸, but neighbours are still 512 apart after the product. With 1/log 2,
// z·factor would overflow for the largest logits, and adding a bias to n would be inexact.
template <typename scalar_t>
class RowExponential {
 public:
  using Term = float;
  using Sum = float;  // in which a thread adds terms
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(float largest) {
    constexpr bool kMayBeFar = !std::is_same_v<scalar_t, c10::Half>;
    const bool is_far = kMayBeFar && std::fabs(largest) >= 0x1p16f;
    factor_ = is_far ? std::ldexp(1.0f, 17 - std::ilogb(largest)) : 1.44269502f;
    n_ = std::ceil(largest * factor_);
  }
  __device__ double reference() const { return static_cast<double>(n_) / factor_; }

  // Returns the power of two in exp(z − reference).
  __device__ float exponent(float z) const { return std::fma(z, factor_, -n_); }

  // Returns reference − z, more precisely than by rounding the reference to a float.
  __device__ float below(float z) const {
    const float power = exponent(z);
    // The lowest bfloat16 numbers overflow if they are multiplied by 1/log 2.
    return math::is_finite(power) ? -power / factor_ : static_cast<float>(reference()) - z;
  }

  // Returns exp(z − reference) for sums.
  __device__ float term(float z) const { return power_of_two(exponent(z)); }

  // Returns exp(other reference − this one), a power of two; 0 if it is too small for a normal
  // number, 2¹²⁷ if it is larger than that.
  __device__ float from(const RowExponential& other) const {
    if (other.factor_ != factor_) return 0;
    const auto power = static_cast<int>(fminf(fmaxf(other.n_ - n_, -127.0f), 127.0f));
    return __builtin_bit_cast(float, static_cast<uint32_t>(power + 127) << 23);
  }

  // A factor for exponentials. Exponentials are multiplied by 2^kExponentBias, for the reason given
  // in math/cross_entropy_exponential.h, and the factor removes this bias. A factor so small that
  // it would lose digits is used without a bias: its product with a subnormal exponential is 0
  // anyway.
  struct Factor {
    float factor;
    float bias;
    __device__ explicit Factor(float by) {
      const bool is_small = std::fabs(by) < math::kSmallestUnbiased;
      bias = is_small ? 0 : math::kExponentBias;
      factor = is_small ? by : by * static_cast<float>(math::kUnbias);
    }
  };
  // Returns exp(z − reference)·factor for gradients, which are rounded to 11 bits (fp16) or 8
  // (bfloat16) afterwards.
  __device__ float times(float z, const Factor& by) const {
    const float power = power_of_two(std::fma(z, factor_, by.bias - n_));
    return math::Lane<float>::product(power, by.factor);
  }

 private:
  float factor_;
  float n_;
};

// The version for fp32 logits uses math/cross_entropy_exponential.h. Sums are over exponentials of
// more digits than a float has. Exponentials for gradients are rounded to a float, so that they can
// be kept instead of the logits: a gradient has an error of at most 1.6 ulps.
template <>
class RowExponential<float> {
 public:
  using Term = math::InTwo<float>;
  using Sum = double;
  static constexpr double kUnbias = math::kUnbias;

  __device__ explicit RowExponential(float largest) : at_(math::exp_reference(largest)) {}
  __device__ double reference() const { return at_.value(); }

  __device__ float exponent(float z) const { return (z - at_.shift) * 1.44269502f - at_.powers(); }
  __device__ double below(float z) const { return reference() - z; }
  __device__ Term term(float z) const { return math::biased_exp_in_two(z, at_); }

  __device__ double from(const RowExponential& other) const {
    const double below = reference() - other.reference();
    return below == 0 ? 1 : std::exp(-below);
  }

  struct Factor : math::BiasedFactor {
    __device__ explicit Factor(double factor) : math::BiasedFactor(math::biased_factor(factor)) {
#if defined(__CUDA_ARCH__)
      // Otherwise nvcc keeps the double, and converts it again for each pack.
      asm volatile("" : "+f"(high), "+f"(low));
#endif
    }
    // The product with an exponential, rounded once.
    __device__ float times(float exponential) const {
      using L = math::Lane<float>;
      return L::product(L::multiply_add(exponential, high, exponential * low), unbias);
    }
  };
  __device__ float times(float z, const Factor& by) const { return by.times(term(z).high); }

 private:
  math::ExpReference at_;
};

// The version for the variant quick_floats takes a subtraction, a multiply-add and one
// power_of_two.
//
// exp(z − reference) is 2^(d·factor − n) with d = z − shift and an integer n; shift is 0, or the
// largest z if that is beyond ±256. The errors are 2 ulps, 2⁻²⁴·|x| from rounding the exponent x,
// and 2⁻²⁶·|x| from rounding the factor, which the reference n / factor contains, too. torch rounds
// differences of logits in the same way. There is no bias, since it would make x larger: results
// below 2⁻¹²⁶ are 0. A thread adds terms in float: a double for the sum would not fit in the 64
// registers of kernels for sm_80.
template <>
class RowExponential<QuickFloat> {
 public:
  using Term = float;
  using Sum = float;
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(float largest) {
    const math::ExpReference at = math::exp_reference(largest);
    shift_ = at.shift;
    n_ = at.powers();
  }
  __device__ double reference() const { return shift_ + static_cast<double>(n_) / kFactor; }
  __device__ float exponent(float z) const { return std::fma(z - shift_, kFactor, -n_); }
  __device__ double below(float z) const { return reference() - z; }
  __device__ Term term(float z) const { return power_of_two(exponent(z)); }
  __device__ double from(const RowExponential& other) const {
    const double below = reference() - other.reference();
    return below == 0 ? 1 : std::exp(-below);
  }

  struct Factor {
    float factor;
    __device__ explicit Factor(double factor) : factor(static_cast<float>(factor)) {}
    __device__ float times(float exponential) const {
      return math::Lane<float>::product(exponential, factor);
    }
  };
  __device__ float times(float z, const Factor& by) const { return by.times(term(z)); }

 private:
  static constexpr float kFactor = 1.44269502f;
  float shift_;
  float n_;
};

template <>
class RowExponential<double> {
 public:
  using Term = double;
  using Sum = double;
  static constexpr double kUnbias = 1;

  __device__ explicit RowExponential(double largest) : largest_(largest) {}
  __device__ double reference() const { return largest_; }
  __device__ double exponent(double z) const { return (z - largest_) * 1.44269504088896; }
  __device__ double below(double z) const { return largest_ - z; }
  __device__ double term(double z) const { return std::exp(z - largest_); }
  __device__ double from(const RowExponential& other) const { return term(other.largest_); }

  struct Factor {
    double factor;
    __device__ explicit Factor(double factor) : factor(factor) {}
    __device__ double times(double exponential) const { return exponential * factor; }
  };
  __device__ double times(double z, const Factor& by) const { return by.times(term(z)); }

 private:
  double largest_;
};

// Returns the exponential for a row with this largest z. If that is NaN or +∞, the row's results
// are NaN; if it is −∞, every exponential is 0. In these cases the reference may be any number.
template <typename scalar_t>
__device__ RowExponential<scalar_t> row_exponential(RowAcc<scalar_t> largest) {
  return RowExponential<scalar_t>(math::is_finite(largest) ? largest : RowAcc<scalar_t>(0));
}

}  // namespace ampfuse
