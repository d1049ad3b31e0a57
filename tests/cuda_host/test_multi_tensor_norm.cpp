#include "simt/simt.h"

#include "norm_on_host.h"

#include <cmath>
#include <limits>

#include "catch.h"

using ampfuse::math::NormType;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
std::vector<FakeTensor<T>> one_tensor(std::initializer_list<double> values) {
  std::vector<FakeTensor<T>> tensors;
  tensors.emplace_back(values.size(), 1);
  T* out = tensors[0].data();
  for (const double value : values) *out++ = as_element<T>(value);
  return tensors;
}

template <NormType kNorm, typename T>
void check_against_reference() {
  const auto tensors = boundary_tensors<T>();
  const HostNorm result = norm_on_host<kNorm>(tensors, /*grid=*/2, /*finish_grid=*/3);
  // Each lane adds 256 squares in fp32, with errors of 2⁻²⁴ that mostly average out. The result is
  // rounded once more.
  CHECK(result.total_norm == Approx(reference_norm<kNorm>(tensors)).epsilon(1e-6));
  CHECK(result.norms[0] == 0.0f);
  CHECK(result.found_inf == 0.0f);
  CHECK(result.first_nonfinite == -1);
  CHECK(result.nonfinite_count == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("norms match the reference for tensor sizes around every boundary", "",
                   c10::Half, c10::BFloat16, float, double) {
  simt::for_each_schedule([] {
    check_against_reference<NormType::kL1, TestType>();
    check_against_reference<NormType::kL2, TestType>();
    check_against_reference<NormType::kInf, TestType>();
  });
}

TEST_CASE("the bits of a norm do not depend on grid, schedule or rest of the list") {
  auto tensors = boundary_tensors<float>();
  const HostNorm all = norm_on_host<NormType::kL2>(tensors, 1, 1);
  simt::for_each_schedule([&] {
    const int grid = 3;
    const HostNorm again = norm_on_host<NormType::kL2>(tensors, grid, 2);
    CHECK(again.total_norm == all.total_norm);
    CHECK(again.norms == all.norms);
  });
  std::vector<FakeTensor<float>> last;
  last.push_back(std::move(tensors.back()));
  CHECK(norm_on_host<NormType::kL2>(last, 1, 1).norms[0] == all.norms.back());
}

TEST_CASE("non-finite tensors are counted and the first index is reported") {
  auto tensors = boundary_tensors<float>();
  tensors[3].data()[7] = kInfinity;          // one of the single elements after the packs
  tensors[15].data()[8000] = std::nanf("");  // in the last chunk
  tensors[17].data()[19999] = -kInfinity;    // the last element of the list
  simt::for_each_schedule([&] {
    const HostNorm result = norm_on_host<NormType::kL2>(tensors, 2, 3);
    CHECK(result.found_inf == 1.0f);
    CHECK(result.first_nonfinite == 3);
    CHECK(result.nonfinite_count == 3);
    CHECK(std::isnan(result.total_norm));
    CHECK(result.norms[3] == kInfinity);
    CHECK(std::isfinite(result.norms[14]));
  });
}

TEST_CASE("the maximum norm of a tensor with a NaN is NaN") {
  auto tensors = one_tensor<float>({1, 2, std::nan(""), 3});
  CHECK(std::isnan(norm_on_host<NormType::kInf>(tensors, 1, 1).total_norm));
}

TEST_CASE("squares outside the range of fp32 are computed again in double") {
  CHECK(norm_on_host<NormType::kL2>(one_tensor<float>({3e30, 4e30}), 1, 1).total_norm ==
        Approx(5e30f));
  CHECK(norm_on_host<NormType::kL2>(one_tensor<float>({3e-30, 4e-30}), 1, 1).total_norm ==
        Approx(5e-30f));
  CHECK(norm_on_host<NormType::kL2>(one_tensor<float>({1e-45}), 1, 1).total_norm == 1e-45f);
  CHECK(norm_on_host<NormType::kL2>(one_tensor<float>({0, 0}), 1, 1).total_norm == 0.0f);
  const HostNorm huge = norm_on_host<NormType::kL2>(one_tensor<double>({1e200}), 1, 1);
  CHECK(huge.total_norm == kInfinity);  // too large for the float32 result of this run
  CHECK(huge.found_inf == 0.0f);
}

TEST_CASE("complex magnitudes neither overflow nor hide an imaginary NaN") {
  using Complex = ampfuse::math::Complex<float>;
  std::vector<FakeTensor<Complex>> tensors;
  tensors.emplace_back(3, 1);
  tensors[0].data()[0] = {3e30f, 4e30f};
  tensors[0].data()[1] = {0, 0};
  tensors[0].data()[2] = {1, -1};
  CHECK(norm_on_host<NormType::kInf>(tensors, 1, 1).total_norm == Approx(5e30f));
  tensors[0].data()[2].im = std::nanf("");
  CHECK(norm_on_host<NormType::kL1>(tensors, 1, 1).first_nonfinite == 0);
}

TEST_CASE("a list longer than a table gives one norm over all its tensors") {
  std::vector<FakeTensor<float>> tensors;
  for (int t = 0; t < ampfuse::NormTable::kCapacity + 10; ++t) {
    tensors.push_back(random_tensor<float>(3, t % 4, t));
  }
  const HostNorm result = norm_on_host<NormType::kL2>(tensors, 4, 4);
  CHECK(result.total_norm == Approx(reference_norm<NormType::kL2>(tensors)).epsilon(1e-6));
}
