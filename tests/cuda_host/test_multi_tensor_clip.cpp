#include "simt/simt.h"

#include "cuda/multi_tensor_clip.cuh"

#include <cmath>

#include "catch.h"
#include "tensor_lists.h"

using ampfuse::ElementwiseTable;

namespace {

// Returns the number of launches.
template <typename T, typename norm_t>
int clip_on_host(const std::vector<FakeTensor<T>>& tensors, norm_t total_norm, double max_norm) {
  int launches = 0;
  auto builder = ampfuse::build_tables<ElementwiseTable>([&](const ElementwiseTable& table) {
    simt::launch(ampfuse::multi_tensor_clip_kernel<T, norm_t>, 2, ampfuse::kThreads, 0, table,
                 &total_norm, max_norm);
    ++launches;
  });
  for (const auto& tensor : tensors) builder.add({tensor.data()}, tensor.size);
  builder.flush();
  return launches;
}

template <typename T>
void check_scaled(const std::vector<FakeTensor<T>>& tensors,
                  const std::vector<FakeTensor<T>>& before, float factor) {
  int misses = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t i = 0; i < tensors[t].size; ++i) {
      const float expected = static_cast<float>(before[t].data()[i]) * factor;
      misses += tensors[t].data()[i] != static_cast<T>(expected);
    }
  }
  CHECK(misses == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("gradients with a norm above max_norm are scaled down to max_norm", "",
                   c10::Half, c10::BFloat16, float) {
  simt::for_each_schedule([] {
    const auto tensors = boundary_tensors<TestType>();
    clip_on_host(tensors, 8.0, 2.0);
    check_scaled(tensors, boundary_tensors<TestType>(), static_cast<float>(2.0 / (8.0 + 1e-6)));
  });
}

TEST_CASE("gradients with a norm below max_norm are not changed, and a NaN norm makes them NaN") {
  const auto tensors = boundary_tensors<float>();
  tensors[4].data()[3] = std::nanf("");
  clip_on_host(tensors, 1.0f, 2.0);
  CHECK(std::isnan(tensors[4].data()[3]));
  tensors[4].data()[3] = boundary_tensors<float>()[4].data()[3];
  check_scaled(tensors, boundary_tensors<float>(), 1);
  clip_on_host(tensors, std::nanf(""), 2.0);
  CHECK(std::isnan(tensors[17].data()[0]));
}

TEST_CASE("all tensors of a list longer than a table are scaled") {
  const auto many = [] {
    std::vector<FakeTensor<float>> tensors;
    for (int t = 0; t < ElementwiseTable::kCapacity + 5; ++t) {
      tensors.push_back(random_tensor<float>(1 + t % 3, 0, t));
    }
    return tensors;
  };
  const auto tensors = many();
  CHECK(clip_on_host(tensors, 2.0f, 1.0) == 2);
  check_scaled(tensors, many(), static_cast<float>(1.0 / (2.0 + 1e-6)));
}
