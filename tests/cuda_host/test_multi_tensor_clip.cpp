#include "simt/simt.h"

#include "cuda/multi_tensor_clip.cuh"

#include <cmath>
#include <limits>

#include "catch.h"
#include "tensor_lists.h"

using ampfuse::ElementwiseTable;

namespace {

template <typename T, typename norm_t>
void clip_on_host(const std::vector<FakeTensor<T>>& tensors, norm_t total_norm, double max_norm) {
  auto builder = ampfuse::build_tables<ElementwiseTable>([&](const ElementwiseTable& table) {
    simt::launch(ampfuse::multi_tensor_clip_kernel<T, norm_t>, 2, ampfuse::kThreads, 0, table,
                 &total_norm, max_norm);
  });
  for (const auto& tensor : tensors) builder.add({tensor.data()}, tensor.size);
  builder.flush();
}

template <typename T>
bool all_equal(const std::vector<FakeTensor<T>>& a, const std::vector<FakeTensor<T>>& b,
               float factor) {
  for (size_t t = 0; t < a.size(); ++t) {
    for (int64_t i = 0; i < a[t].size; ++i) {
      const float expected = static_cast<float>(b[t].data()[i]) * factor;
      if (a[t].data()[i] != static_cast<T>(expected)) return false;
    }
  }
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("gradients with a norm above max_norm are scaled down to max_norm", "",
                   c10::Half, c10::BFloat16, float) {
  simt::for_each_schedule([] {
    const auto tensors = boundary_tensors<TestType>();
    clip_on_host(tensors, 8.0, 2.0);
    const auto factor = static_cast<float>(2.0 / (8.0 + 1e-6));
    CHECK(all_equal(tensors, boundary_tensors<TestType>(), factor));
  });
}

TEST_CASE("gradients with a norm below max_norm are not changed") {
  const auto tensors = boundary_tensors<float>();
  tensors[4].data()[3] = std::nanf("");
  clip_on_host(tensors, 1.0f, 2.0);
  CHECK(std::isnan(tensors[4].data()[3]));
  tensors[4].data()[3] = boundary_tensors<float>()[4].data()[3];
  CHECK(all_equal(tensors, boundary_tensors<float>(), 1.0f));
}

TEST_CASE("all tensors of a list longer than a table are scaled") {
  std::vector<FakeTensor<float>> tensors;
  for (int t = 0; t < ElementwiseTable::kCapacity + 5; ++t) {
    tensors.push_back(random_tensor<float>(1 + t % 3, 0, t));
  }
  int launches = 0;
  const float norm = 2.0f;
  auto builder = ampfuse::build_tables<ElementwiseTable>([&](const ElementwiseTable& table) {
    simt::launch(ampfuse::multi_tensor_clip_kernel<float, float>, 2, ampfuse::kThreads, 0, table,
                 &norm, 1.0);
    ++launches;
  });
  for (const auto& tensor : tensors) builder.add({tensor.data()}, tensor.size);
  builder.flush();
  CHECK(launches == 2);
  const auto factor = static_cast<float>(1.0 / (2.0 + 1e-6));
  bool equal = true;
  for (int t = 0; t < ElementwiseTable::kCapacity + 5; ++t) {
    const auto before = random_tensor<float>(1 + t % 3, 0, t);
    for (int i = 0; i < before.size; ++i) {
      equal = equal && tensors[t].data()[i] == before.data()[i] * factor;
    }
  }
  CHECK(equal);
}

TEST_CASE("a NaN norm makes gradients NaN") {
  const auto tensors = boundary_tensors<float>();
  clip_on_host(tensors, std::nanf(""), 2.0);
  CHECK(std::isnan(tensors[17].data()[0]));
}
