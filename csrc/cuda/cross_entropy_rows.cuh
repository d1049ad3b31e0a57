// Rows of logits on a device: who works on one, how it is read, and what a number of it is worth.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../math/cross_entropy.h"
#include "../math/exponential.h"
#include "launch.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// A warp, for rows that are short.
class WarpTeam {
 public:
  static constexpr int kSize = kWarp;
  static constexpr int kScratch = 1;  // numbers in shared memory, which it does not need

  __device__ explicit WarpTeam(double*) : lane_(static_cast<int>(threadIdx.x) % kWarp) {}
  __device__ int index() const { return lane_; }
  __device__ int64_t number() const {
    return int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  }
  __device__ static int64_t count() { return int64_t(gridDim.x) * kWarpsPerBlock; }
  __device__ void sync() const { __syncwarp(); }

  // The same for all lanes: each pair joins the same two.
  template <typename Join>
  __device__ double joined(double x, Join join) const {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      x = join(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
  }

 private:
  int lane_;
};

// A block.
class BlockTeam {
 public:
  static constexpr int kSize = kThreads;
  static constexpr int kScratch = kWarpsPerBlock;

  __device__ explicit BlockTeam(double* scratch) : scratch_(scratch) {}
  __device__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ int64_t number() const { return blockIdx.x; }
  __device__ static int64_t count() { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }

  template <typename Join>
  __device__ double joined(double x, Join join) const {
    x = WarpTeam(nullptr).joined(x, join);
    if (index() % kWarp == 0) scratch_[index() / kWarp] = x;
    __syncthreads();
    x = scratch_[0];
#pragma unroll
    for (int w = 1; w < kWarpsPerBlock; ++w) x = join(x, scratch_[w]);
    __syncthreads();  // scratch_ is written again by the next
    return x;
  }

 private:
  double* scratch_;
};

template <typename Team>
__device__ double team_sum(const Team& team, double x) {
  return team.joined(x, [](double a, double b) { return a + b; });
}
template <typename Team>
__device__ double team_largest(const Team& team, double x) {
  return team.joined(x, [](double a, double b) { return math::Lane<double>::larger(a, b); });
}

// What logits are computed with.
template <typename scalar_t>
using RowAcc = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// exp(z − reference), and the gradient that is made of it. 16-bit logits take the device's own
// power of two, at 2 ulps of fp32, with which two exponentials per logit cost less than moving its
// 4 bytes; fp32 ones what math/exponential.h has, whose last digit is right.
template <typename scalar_t>
struct RowExponential {
  float largest;

  __device__ explicit RowExponential(float largest) : largest(largest) {}
  __device__ double reference() const { return largest; }
  __device__ float one(float z) const { return exp2f((z - largest) * 1.44269504f); }
  __device__ double term(float z) const { return one(z); }
  static constexpr double kUnbias = 1;

  struct Factor {
    float factor;
    __device__ explicit Factor(double factor) : factor(static_cast<float>(factor)) {}
  };
  __device__ float times(float z, const Factor& by) const { return one(z) * by.factor; }
};

template <>
struct RowExponential<float> {
  math::ExpReference at;

  __device__ explicit RowExponential(float largest) : at(math::exp_reference(largest)) {}
  __device__ double reference() const { return at.value(); }
  __device__ double term(float z) const {
    const math::InTwo<float> e = math::biased_exp_in_two(z, at);
    return static_cast<double>(e.high) + e.low;
  }
  static constexpr double kUnbias = math::kUnbias;

  struct Factor {
    float high;
    float low;
    float unbias;
    __device__ explicit Factor(double factor) : unbias(1) {
      // Apart, where the factor is so small that it would not be normal with it.
      const bool is_apart = std::fabs(factor) < 0x1p-80;
      if (is_apart) unbias = static_cast<float>(math::kUnbias);
      if (!is_apart) factor *= math::kUnbias;
      high = static_cast<float>(factor);
      const double rest = factor - static_cast<double>(high);
      low = math::is_finite(rest) ? static_cast<float>(rest) : 0.0f;
    }
  };
  __device__ float times(float z, const Factor& by) const {
    const math::InTwo<float> e = math::biased_exp_in_two(z, at);
    return std::fma(e.high, by.high, std::fma(e.low, by.high, e.high * by.low)) * by.unbias;
  }
};

template <>
struct RowExponential<double> {
  double largest;

  __device__ explicit RowExponential(double largest) : largest(largest) {}
  __device__ double reference() const { return largest; }
  __device__ double term(double z) const { return std::exp(z - largest); }
  static constexpr double kUnbias = 1;

  struct Factor {
    double factor;
    __device__ explicit Factor(double factor) : factor(factor) {}
  };
  __device__ double times(double z, const Factor& by) const { return term(z) * by.factor; }
};

// Calls visit(first class, pack) for a row, from the threads of a team: single elements before the
// first 16-byte boundary and behind the last one, in packs of one, and 16 bytes at a time between.
// Each thread has kUnroll packs on their way before it uses the first.
template <int kUnroll, typename Team, typename scalar_t, typename Visit>
__device__ __forceinline__ void visit_row(const Team& team, const scalar_t* row, int classes,
                                          bool in_packs, const Visit& visit) {
  using P = Pack<scalar_t>;
  const int past =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) % sizeof(P) / sizeof(scalar_t));
  const int until_aligned = past == 0 ? 0 : P::kSize - past;
  const int head = !in_packs || until_aligned > classes ? classes : until_aligned;
  const int packs = (classes - head) / P::kSize;
  const auto visit_one = [&](int i) { visit(i, Pack<scalar_t, 1>{{row[i]}}); };
#pragma unroll 1
  for (int i = team.index(); i < head; i += Team::kSize) visit_one(i);

  const P* const body = reinterpret_cast<const P*>(row + head);
  int p = team.index();
  for (; p + (kUnroll - 1) * Team::kSize < packs; p += kUnroll * Team::kSize) {
    P pack[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) pack[u] = body[p + u * Team::kSize];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) visit(head + (p + u * Team::kSize) * P::kSize, pack[u]);
  }
#pragma unroll 1
  for (; p < packs; p += Team::kSize) visit(head + p * P::kSize, body[p]);

#pragma unroll 1
  for (int i = head + packs * P::kSize + team.index(); i < classes; i += Team::kSize) {
    visit_one(i);
  }
}

}  // namespace ampfuse
