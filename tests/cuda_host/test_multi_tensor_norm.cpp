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
void check_against_reference(const std::vector<FakeTensor<T>>& tensors) {
  long double sum = 0;
  for (const auto& tensor : tensors) {
    for (int64_t i = 0; i < tensor.size; ++i) {
      const long double x = std::fabs(static_cast<double>(tensor.data()[i]));
      sum = kNorm == NormType::kInf ? std::max(sum, x) : sum + (kNorm == NormType::kL1 ? x : x * x);
    }
  }
  const auto expected = static_cast<double>(kNorm == NormType::kL2 ? std::sqrt(sum) : sum);
  const HostNorm result = norm_on_host<kNorm>(tensors, /*grid=*/2, /*finish_grid=*/3);
  // Each lane adds 256 squares in fp32, with errors of 2⁻²⁴ that mostly average out. The result is
  // rounded once more.
  CHECK(result.total_norm == Approx(expected).epsilon(1e-6));
  CHECK(result.found_inf == 0.0f);
  CHECK(result.first_nonfinite == -1);
  CHECK(result.nonfinite_count == 0);
  if (tensors[0].size == 0) CHECK(result.norms[0] == 0.0f);
}

}  // namespace

TEMPLATE_TEST_CASE("norms match the reference for tensor sizes around every boundary", "",
                   c10::Half, c10::BFloat16, float, double) {
  simt::for_each_schedule([] {
    const auto tensors = boundary_tensors<TestType>();
    check_against_reference<NormType::kL1>(tensors);
    check_against_reference<NormType::kL2>(tensors);
    check_against_reference<NormType::kInf>(tensors);
  });
}

TEST_CASE("a list longer than a table gives one norm over all its tensors") {
  std::vector<FakeTensor<float>> tensors;
  for (int t = 0; t < ampfuse::NormTable::kCapacity + 10; ++t) {
    tensors.push_back(random_tensor<float>(3, t % 4, t));
  }
  check_against_reference<NormType::kL2>(tensors);
  for (const int t : {5, 5 + ampfuse::kThreads}) tensors[t].data()[0] = kInfinity;  // one thread's
  CHECK(norm_on_host<NormType::kL2>(tensors).first_nonfinite == 5);
}

TEST_CASE("the bits of a norm do not depend on grid, schedule or rest of the list") {
  auto tensors = boundary_tensors<float>();
  const HostNorm all = norm_on_host<NormType::kL2>(tensors);
  simt::for_each_schedule([&] {
    const HostNorm again = norm_on_host<NormType::kL2>(tensors, /*grid=*/3, /*finish_grid=*/2);
    CHECK(again.total_norm == all.total_norm);
    CHECK(again.norms == all.norms);
  });
  std::vector<FakeTensor<float>> last;
  last.push_back(std::move(tensors.back()));
  CHECK(norm_on_host<NormType::kL2>(last).norms[0] == all.norms.back());
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
  CHECK(std::isnan(
      norm_on_host<NormType::kInf>(one_tensor<float>({1, 2, std::nan(""), 3})).total_norm));
}

TEST_CASE("squares outside the range of fp32 are computed again in double") {
  const auto norm = [](std::initializer_list<double> values) {
    return norm_on_host<NormType::kL2>(one_tensor<float>(values)).total_norm;
  };
  CHECK(norm({3e30, 4e30}) == Approx(5e30f));
  CHECK(norm({3e-30, 4e-30}) == Approx(5e-30f));
  CHECK(norm({1e-45}) == 1e-45f);
  CHECK(norm({0, 0}) == 0.0f);
  const HostNorm huge = norm_on_host<NormType::kL2>(one_tensor<double>({1e200}));
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
  CHECK(norm_on_host<NormType::kInf>(tensors).total_norm == Approx(5e30f));
  tensors[0].data()[2].im = std::nanf("");
  CHECK(norm_on_host<NormType::kL1>(tensors).first_nonfinite == 0);
}
