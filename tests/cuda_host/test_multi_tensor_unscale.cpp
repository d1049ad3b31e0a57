#include "simt/simt.h"

#include "cuda/multi_tensor_unscale.cuh"

#include <cmath>

#include "catch.h"
#include "norm_on_host.h"

using ampfuse::ElementwiseTable;
using ampfuse::math::NormType;

namespace {

template <typename T>
HostNorm unscale_norm_on_host(const std::vector<FakeTensor<T>>& tensors, float inv_scale) {
  return run_norm_kernels<NormType::kL2>(
      tensors, 2,
      [&](const ampfuse::NormTable& table, int64_t slots_before,
          ampfuse::math::NormPartial* partials, unsigned* finished) {
        simt::launch(ampfuse::multi_tensor_unscale_norm_kernel<NormType::kL2, T>, 2,
                     ampfuse::kThreads, 0, table, &inv_scale, slots_before, partials, finished);
      });
}

template <typename T>
void unscale_on_host(const std::vector<FakeTensor<T>>& tensors, float inv_scale, float* found_inf) {
  auto builder = ampfuse::build_tables<ElementwiseTable>([&](const ElementwiseTable& table) {
    simt::launch(ampfuse::multi_tensor_unscale_kernel<T>, 2, ampfuse::kThreads, 0, table,
                 &inv_scale, found_inf);
  });
  for (const auto& tensor : tensors) builder.add({tensor.data()}, tensor.size);
  builder.flush();
}

}  // namespace

TEMPLATE_TEST_CASE("every element is multiplied once and rounded once", "", c10::Half,
                   c10::BFloat16, float, double) {
  using acc_t = std::conditional_t<std::is_same_v<TestType, double>, double, float>;
  simt::for_each_schedule([] {
    const auto tensors = boundary_tensors<TestType>();
    const auto before = boundary_tensors<TestType>();
    const float inv_scale = 1.0f / 3;
    float found_inf = 0;
    unscale_on_host(tensors, inv_scale, &found_inf);
    int misses = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (int64_t i = 0; i < tensors[t].size; ++i) {
        misses += tensors[t].data()[i] !=
                  static_cast<TestType>(static_cast<acc_t>(before[t].data()[i]) * inv_scale);
      }
    }
    CHECK(misses == 0);
    CHECK(found_inf == 0.0f);
  });
}

TEST_CASE("an element that becomes non-finite sets the flag, which is never cleared") {
  simt::for_each_schedule([] {
    float found_inf = 0;
    for (const int i : {0, 12345, 19999}) {  // read by different lanes
      const auto tensors = boundary_tensors<c10::Half>();
      tensors[17].data()[i] = 60000.0f;  // finite, but twice it overflows
      found_inf = 0;
      unscale_on_host(tensors, 2.0f, &found_inf);
      CHECK(found_inf == 1.0f);
    }
    unscale_on_host(boundary_tensors<c10::Half>(), 0.5f, &found_inf);
    CHECK(found_inf == 1.0f);
  });
}

TEST_CASE("a factor of 1 keeps every bit, even NaN payloads, and sets the flag") {
  auto tensors = boundary_tensors<float>();
  const uint32_t signalling = 0x7fa12345;
  std::memcpy(tensors[5].data() + 3, &signalling, sizeof signalling);
  tensors[6].data()[0] = -0.0f;
  float found_inf = 0;
  unscale_on_host(tensors, 1.0f, &found_inf);
  CHECK(std::memcmp(tensors[5].data() + 3, &signalling, sizeof signalling) == 0);
  CHECK(std::signbit(tensors[6].data()[0]));
  CHECK(found_inf == 1.0f);
}

TEMPLATE_TEST_CASE("the norm of the unscaling pass has the bits of a norm computed later", "",
                   c10::BFloat16, float) {
  const float inv_scale = GENERATE(1.0f, 0.3f);
  simt::for_each_schedule([inv_scale] {
    const auto tensors = boundary_tensors<TestType>();
    const HostNorm fused = unscale_norm_on_host(tensors, inv_scale);
    const HostNorm after = norm_on_host<NormType::kL2>(tensors, 2, 2);
    CHECK(fused.total_norm == after.total_norm);
    CHECK(fused.norms == after.norms);
  });
}

TEST_CASE("a chunk that is read again has the values that the whole warp wrote") {
  simt::for_each_schedule([] {
    std::vector<FakeTensor<float>> tensors;
    tensors.emplace_back(100, 1);
    for (int i = 0; i < 100; ++i) tensors[0].data()[i] = 2e20f;  // squares overflow fp32
    CHECK(unscale_norm_on_host(tensors, 0.5f).total_norm == Approx(1e21f));
  });
}
