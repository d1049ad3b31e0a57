// Norms, unscaling and clipping of gradients as C++ programs call them. tests/python/ops compares
// values with float64.
#include <ampfuse/ampfuse.h>

#include <cmath>
#include <limits>

#include "optim_models.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Parameters with gradients, and one without.
Tensors parameters_with_grads(torch::Device device) {
  Tensors params = parameters(device);
  params.pop_back();  // torch refuses the maximum of no element
  feed(params, 2);
  params.push_back(torch::zeros({5}, torch::TensorOptions(device).requires_grad(true)));
  return params;
}

}  // namespace

TEST_CASE("multi_tensor_norm returns norms, the flag, and where the first non-finite tensor is") {
  const double ord = GENERATE(1.0, 2.0, kInfinity);
  for (const auto device : devices()) {
    torch::manual_seed(1);
    const auto options = torch::TensorOptions().device(device);
    // One tensor per memory layout and dtype.
    Tensors tensors = {
        torch::randn({8193}, options), torch::randn({33, 7}, options.dtype(torch::kHalf)).t(),
        torch::empty({0, 3}, options), torch::randn({}, options.dtype(torch::kBFloat16)),
        torch::randn({64, 64}, options).slice(1, 0, 64, 2)};
    Tensors flat;
    for (const auto& tensor : tensors) flat.push_back(tensor.to(torch::kDouble).flatten());
    const auto expected = torch::linalg_vector_norm(torch::cat(flat), ord).item<double>();

    const auto finite = ampfuse::multi_tensor_norm(tensors, ord);
    CHECK(finite.total_norm.item<double>() == Approx(expected).epsilon(1e-6));
    CHECK(finite.norms.numel() == 5);
    CHECK(finite.norms[2].item<float>() == 0);
    CHECK(finite.found_inf.item<float>() == 0);
    CHECK(finite.first_nonfinite.item<int64_t>() == -1);
    tensors[3].fill_(kInfinity);
    tensors[4][7][3] = std::nanf("");
    const auto spoiled = ampfuse::multi_tensor_norm(tensors, ord);
    CHECK(spoiled.found_inf.item<float>() == 1);
    CHECK(spoiled.first_nonfinite.item<int64_t>() == 3);
    CHECK(spoiled.nonfinite_count.item<int64_t>() == 2);
    CHECK(std::isnan(spoiled.total_norm.item<float>()));
  }
  CHECK(ampfuse::multi_tensor_norm({}, ord).total_norm.item<float>() == 0);
  CHECK_THROWS_WITH(ampfuse::multi_tensor_norm({torch::ones({2}), torch::Tensor()}, ord),
                    ContainsSubstring("tensors[1]"));
}

TEST_CASE("gradients are unscaled in place, and the flag is never reset") {
  for (const auto device : devices()) {
    const auto options = torch::TensorOptions().device(device);
    const auto found_inf = torch::zeros({}, options);
    const auto half = torch::full({}, 0.5, options);
    const Tensors grads = {torch::tensor({6.0f}, options),
                           torch::tensor({8.0f, 0.0f}, options.dtype(torch::kHalf))};

    const auto norm = ampfuse::multi_tensor_unscale_norm(grads, found_inf, half);
    CHECK(grads[0].item<float>() == 3);
    CHECK(grads[1][0].item<float>() == 4);
    CHECK(norm.total_norm.item<float>() == 5);
    CHECK(norm.norms[1].item<float>() == 4);
    CHECK(norm.first_nonfinite.item<int64_t>() == -1);
    CHECK(found_inf.item<float>() == 0);

    grads[1][1] = kInfinity;
    for (int i = 0; i < 2; ++i) {
      ampfuse::multi_tensor_unscale(grads, found_inf, half);
      CHECK(found_inf.item<float>() == 1);
      grads[1][1] = 1;
    }
    CHECK(grads[0].item<float>() == 0.75);

    ampfuse::multi_tensor_clip(grads, torch::full({}, 5.0, options), 10.0);
    CHECK(grads[0].item<float>() == 0.75);
    ampfuse::multi_tensor_clip(grads, torch::full({}, 5.0, options), 1.0);
    CHECK(grads[0].item<float>() == Approx(0.15f).epsilon(1e-6));
  }
}

TEST_CASE("clip_grad_norm_ clips as torch's does and returns a tensor") {
  const double norm_type = GENERATE(1.0, 2.0, kInfinity);
  const double max_norm = GENERATE(0.5, -1.0);  // torch does not check it
  for (const auto device : devices()) {
    const auto ours = parameters_with_grads(device);
    const auto theirs = parameters_with_grads(device);
    const auto norm = ampfuse::clip_grad_norm_(ours, max_norm, norm_type);
    const double expected = torch::nn::utils::clip_grad_norm_(theirs, max_norm, norm_type);

    CHECK(norm.item<double>() == Approx(expected).epsilon(1e-5));  // torch's sums in float32
    for (size_t i = 0; i + 1 < ours.size(); ++i) {
      CHECK(torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-5, 1e-8));
    }
  }
  CHECK(ampfuse::clip_grad_norm_({torch::zeros({2})}, 1.0).item<float>() == 0);  // no gradient
}

TEST_CASE("an undefined tensor in a list of gradients or parameters is refused") {
  const std::vector<torch::Tensor> tensors = {torch::ones({2}), torch::Tensor()};
  CHECK_THROWS_WITH(ampfuse::clip_grad_norm_(tensors, 1),
                    ContainsSubstring("parameters[1]: expected a tensor, got an undefined one"));
  CHECK_THROWS_WITH(ampfuse::get_total_norm(tensors),
                    ContainsSubstring("tensors[1]: expected a tensor, got an undefined one"));
}

TEST_CASE("clip_grad_norm_ with error_if_nonfinite throws before it changes gradients") {
  const auto params = parameters_with_grads(torch::kCPU);
  params[2].grad()[7] = std::nanf("");
  const auto before = params[0].grad().clone();
  CHECK_THROWS_WITH(ampfuse::clip_grad_norm_(params, 0.5, 2.0, /*error_if_nonfinite=*/true),
                    ContainsSubstring("is non-finite, so it cannot be clipped"));
  CHECK(torch::equal(params[0].grad(), before));
}

TEST_CASE("clipping and steps take conjugate gradients, which autograd makes") {
  const auto make = [](bool is_conjugate) {
    torch::manual_seed(3);
    const auto param = torch::ones({3}, torch::kComplexFloat).requires_grad_(true);
    const auto grad = torch::randn({3}, torch::kComplexFloat).conj();
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
    ampfuse::AdamW({ours}).step();
    ampfuse::AdamW({plain}).step();
    CHECK(torch::equal(ours, plain));
  }
  SECTION("GradScaler") {
    for (const auto& param : {ours, plain}) {
      torch::optim::SGD optimizer({param}, 0.1);
      ampfuse::GradScaler scaler;
      std::ignore = scaler.scale(torch::ones({}));
      scaler.unscale_(optimizer);
    }
    CHECK(torch::equal(ours.grad(), plain.grad()));
  }
}
