#include "linear_cross_entropy_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <limits>

#include "../cpu/bfloat16_product.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/variant.h"

// MKL's product. torch's CPU library contains it on x86, but has no operator for it. On Intel
// processors with bfloat16 instructions it is many times as fast as a product that widens the
// numbers, and on no processor is it slower. The symbol is weak: it is null if torch does not
// contain MKL.
extern "C" [[gnu::weak]] void cblas_gemm_bf16bf16f32(int layout, int a_is_transposed,
                                                     int b_is_transposed, int m, int n, int k,
                                                     float alpha, const void* a, int a_stride,
                                                     const void* b, int b_stride, float beta,
                                                     float* c, int c_stride);

namespace ampfuse {

namespace {

// A matrix as BLAS describes it: contiguous rows, or columns, that start `stride` elements apart.
struct BlasMatrix {
  int layout;
  int stride;

  explicit BlasMatrix(const at::Tensor& matrix) {
    constexpr int kAsItIs = 111;
    constexpr int kTransposed = 112;
    const bool has_rows = matrix.size(1) <= 1 || matrix.stride(1) == 1;
    TORCH_INTERNAL_ASSERT(has_rows || matrix.stride(0) == 1);
    layout = has_rows ? kAsItIs : kTransposed;
    const int64_t length = matrix.size(has_rows ? 1 : 0);
    const int64_t apart = std::max({matrix.stride(has_rows ? 0 : 1), length, int64_t{1}});
    constexpr int64_t kFurthest = std::numeric_limits<int>::max();
    TORCH_CHECK_VALUE(apart <= kFurthest,
                      "linear_cross_entropy: hidden and weight: expected rows at most ", kFurthest,
                      " elements apart, got ", apart);
    stride = static_cast<int>(apart);
  }
};

bool has_mkl() {
  return cblas_gemm_bf16bf16f32 != nullptr;
}

// MKL uses bfloat16 instructions only on Intel processors. The variant lets them use our products.
bool prefers_mkl() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel") && !has_variant("own_product")) return has_mkl();
#endif
  return !has_bfloat16_product();
}

void mkl_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, float beta) {
  constexpr int kRowMajor = 101;
  const BlasMatrix a_matrix(a);
  const BlasMatrix b_matrix(b);
  cblas_gemm_bf16bf16f32(kRowMajor, a_matrix.layout, b_matrix.layout, static_cast<int>(a.size(0)),
                         static_cast<int>(b.size(1)), static_cast<int>(a.size(1)), 1,
                         a.const_data_ptr(), a_matrix.stride, b.const_data_ptr(), b_matrix.stride,
                         beta, out.mutable_data_ptr<float>(), BlasMatrix(out).stride);
}

void cpu_bfloat16_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (prefers_mkl()) return mkl_product(out, a, b, add ? 1 : 0);
  const auto matrix = [](const at::Tensor& of) {
    return BFloat16Matrix{of.const_data_ptr(), of.stride(0), of.stride(1)};
  };
  bfloat16_product(matrix(a), matrix(b), a.size(0), b.size(1), a.size(1), add,
                   out.mutable_data_ptr<float>(), out.stride(0));
}

}  // namespace

bool has_wide_product(at::ScalarType dtype, at::Device device) {
  if (!is_16bit(dtype) || device.is_cuda()) return true;
  return dtype == at::kBFloat16 && (has_mkl() || has_bfloat16_product());
}

void wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const std::optional<at::Tensor>& plus) {
  if (a.scalar_type() == out.scalar_type()) {
    plus ? at::addmm_out(out, *plus, a, b) : at::mm_out(out, a, b);
    return;
  }
  // The products below add only to `out` itself, so another summand is copied there first: on a
  // GPU, some of torch's products refuse to add a vector to a result of another dtype.
  if (plus && !plus->is_same(out)) out.copy_(*plus);
  if (out.is_cuda()) {
    const at::ScalarType dtype = out.scalar_type();
    plus ? at::addmm_outf(out, a, b, dtype, 1, 1, out) : at::mm_outf(a, b, dtype, out);
  } else if (out.numel() > 0 && a.size(1) > 0) {
    cpu_bfloat16_product(out, a, b, plus.has_value());
  } else if (!plus) {
    out.zero_();
  }
}

}  // namespace ampfuse
