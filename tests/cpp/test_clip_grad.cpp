#include <ampfuse/ampfuse.h>
#include <ampfuse/clip_grad.h>

#include <cmath>
#include <limits>

#include "torch_catch.h"

namespace {

std::vector<torch::Tensor> parameters_with_grads(torch::Device device) {
  torch::manual_seed(2);
  const auto options = torch::TensorOptions().device(device);
  std::vector<torch::Tensor> parameters;
  for (const int64_t size : {1, 1000, 8193}) {
    parameters.push_back(torch::zeros({size}, options.requires_grad(true)));
    parameters.back().mutable_grad() = torch::randn({size}, options);
  }
  parameters.push_back(torch::zeros({5}, options.requires_grad(true)));  // has no gradient
  return parameters;
}

}  // namespace

TEST_CASE("clip_grad_norm_ clips as torch's does and returns a tensor") {
  const double norm_type = GENERATE(1.0, 2.0, std::numeric_limits<double>::infinity());
  for (const auto device : devices()) {
    const auto ours = parameters_with_grads(device);
    const auto theirs = parameters_with_grads(device);
    const auto norm = ampfuse::clip_grad_norm_(ours, 0.5, norm_type);
    const double expected = torch::nn::utils::clip_grad_norm_(theirs, 0.5, norm_type);

    CHECK(norm.item<double>() == Approx(expected).epsilon(1e-5));  // torch's sums in float32
    for (size_t i = 0; i < 3; ++i) {
      CHECK(torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-5, 1e-8));
    }
  }
}

TEST_CASE("clip_grad_norm_ with error_if_nonfinite throws before it changes gradients") {
  const auto parameters = parameters_with_grads(torch::kCPU);
  parameters[1].grad()[7] = std::nanf("");
  const auto before = parameters[2].grad().clone();
  CHECK_THROWS_WITH(ampfuse::clip_grad_norm_(parameters, 0.5, 2.0, /*error_if_nonfinite=*/true),
                    ContainsSubstring("is non-finite, so it cannot be clipped"));
  CHECK(torch::equal(parameters[2].grad(), before));
}

TEST_CASE("clip_grad_norm_ without gradients returns 0") {
  CHECK(ampfuse::clip_grad_norm_({torch::zeros({2})}, 1.0).item<float>() == 0.0f);
}

TEST_CASE("clipping and steps take conjugate gradients, which autograd makes") {
  const auto options = torch::TensorOptions().dtype(torch::kComplexFloat);
  const auto make = [&](bool is_conjugate) {
    torch::manual_seed(3);
    const auto param = torch::ones({3}, options).requires_grad_(true);
    const auto grad = torch::randn({3}, options).conj();
    param.mutable_grad() = is_conjugate ? grad : grad.resolve_conj();
    return param;
  };
  const auto ours = make(true);
  const auto plain = make(false);
  REQUIRE(ours.grad().is_conj());
  SECTION("clip_grad_norm_") {
    ampfuse::clip_grad_norm_({ours}, 0.1);
    ampfuse::clip_grad_norm_({plain}, 0.1);
    CHECK(torch::equal(ours.grad(), plain.grad()));
  }
  SECTION("AdamW") {
    ampfuse::AdamW({ours}, ampfuse::AdamWOptions(1e-3)).step();
    ampfuse::AdamW({plain}, ampfuse::AdamWOptions(1e-3)).step();
    CHECK(torch::equal(ours, plain));
  }
  SECTION("GradScaler") {
    for (const auto& param : {ours, plain}) {
      torch::optim::SGD optimizer({param}, 0.1);
      ampfuse::GradScaler scaler;
      scaler.scale(torch::ones({}));
      scaler.unscale_(optimizer);
    }
    CHECK(torch::equal(ours.grad(), plain.grad()));
  }
}
