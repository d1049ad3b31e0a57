#include <ampfuse/multi_tensor_norm.h>

#include <cmath>
#include <limits>

#include "torch_catch.h"

namespace {

// One tensor per memory layout and dtype. The size 8193 is one more than a chunk.
std::vector<torch::Tensor> mixed_list(torch::Device device) {
  torch::manual_seed(1);
  const auto options = torch::TensorOptions().device(device);
  return {torch::randn({8193}, options),
          torch::randn({33, 7}, options.dtype(torch::kHalf)).t(),
          torch::empty({0, 3}, options),
          torch::randn({}, options.dtype(torch::kBFloat16)),
          torch::randn({64, 64}, options).slice(1, 0, 64, 2),
          torch::randn({100}, options).slice(0, 1)};
}

torch::Tensor as_one_double_vector(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.to(torch::kDouble).flatten());
  return torch::cat(flat);
}

}  // namespace

TEST_CASE("multi_tensor_norm returns the norm of the list as one vector") {
  const double ord = GENERATE(1.0, 2.0, std::numeric_limits<double>::infinity());
  for (const auto device : devices()) {
    const auto tensors = mixed_list(device);
    const auto result = ampfuse::multi_tensor_norm(tensors, ord);
    const double expected =
        torch::linalg_vector_norm(as_one_double_vector(tensors), ord).item<double>();

    CHECK(result.total_norm.scalar_type() == torch::kFloat);
    CHECK(result.total_norm.device() == tensors[0].device());
    // The error is one rounding to float32, plus the error of float32 sums within a chunk.
    CHECK(result.total_norm.item<double>() == Approx(expected).epsilon(1e-6));
    REQUIRE(result.norms.numel() == 6);
    CHECK(result.norms[2].item<float>() == 0.0f);
    CHECK(result.found_inf.item<float>() == 0.0f);
    CHECK(result.first_nonfinite.item<int64_t>() == -1);
  }
}

TEST_CASE("multi_tensor_norm reports non-finite tensors") {
  for (const auto device : devices()) {
    auto tensors = mixed_list(device);
    tensors[3].fill_(std::numeric_limits<float>::infinity());
    tensors[5][98] = std::nanf("");
    const auto result = ampfuse::multi_tensor_norm(tensors);

    CHECK(result.found_inf.item<float>() == 1.0f);
    CHECK(result.first_nonfinite.item<int64_t>() == 3);
    CHECK(result.nonfinite_count.item<int64_t>() == 2);
    CHECK(std::isnan(result.total_norm.item<float>()));
  }
}

TEST_CASE("multi_tensor_norm is right if squares leave the range of float32") {
  for (const auto device : devices()) {
    const auto huge = torch::full({4}, 1e30, torch::TensorOptions().device(device));
    const auto tiny = torch::full({4}, 1e-30, torch::TensorOptions().device(device));
    const auto result = ampfuse::multi_tensor_norm({huge});

    CHECK(result.total_norm.item<float>() == Approx(2e30f));
    CHECK(result.found_inf.item<float>() == 0.0f);
    CHECK(ampfuse::multi_tensor_norm({tiny}).total_norm.item<float>() == Approx(2e-30f));
  }
}

TEST_CASE("multi_tensor_norm of an empty list is 0") {
  CHECK(ampfuse::multi_tensor_norm({}).total_norm.item<float>() == 0.0f);
}

TEST_CASE("multi_tensor_norm refuses unsupported tensors by name and index") {
  const auto good = torch::ones({2});
  CHECK_THROWS_WITH(ampfuse::multi_tensor_norm({good, torch::ones({2}, torch::kLong)}),
                    ContainsSubstring("tensors[1]") && ContainsSubstring("got int64"));
  CHECK_THROWS_WITH(ampfuse::multi_tensor_norm({good, torch::Tensor()}),
                    ContainsSubstring("tensors[1]"));
  CHECK_THROWS_WITH(ampfuse::multi_tensor_norm({good, torch::ones({2}, torch::kMeta)}),
                    ContainsSubstring("tensors[1]") && ContainsSubstring("device"));
  CHECK_THROWS_WITH(ampfuse::multi_tensor_norm({good}, 3.0), ContainsSubstring("ord"));
}
