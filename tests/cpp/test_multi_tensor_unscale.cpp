#include <ampfuse/multi_tensor_clip.h>
#include <ampfuse/multi_tensor_unscale.h>

#include <limits>

#include "torch_catch.h"

TEST_CASE("multi_tensor_unscale multiplies in place and never resets the flag") {
  for (const auto device : devices()) {
    const auto options = torch::TensorOptions().device(device);
    const auto found_inf = torch::zeros({}, options);
    const auto half = torch::full({}, 0.5, options);
    std::vector<torch::Tensor> grads = {torch::full({8193}, 4.0, options),
                                        torch::full({3}, 4.0, options.dtype(torch::kHalf))};

    ampfuse::multi_tensor_unscale(grads, found_inf, half);
    CHECK(grads[0].eq(2).all().item<bool>());
    CHECK(grads[1].eq(2).all().item<bool>());
    CHECK(found_inf.item<float>() == 0.0f);

    grads[1][1] = std::numeric_limits<float>::infinity();
    ampfuse::multi_tensor_unscale(grads, found_inf, half);
    CHECK(found_inf.item<float>() == 1.0f);
    grads[1][1] = 1;
    ampfuse::multi_tensor_unscale(grads, found_inf, half);
    CHECK(found_inf.item<float>() == 1.0f);
  }
}

TEST_CASE("multi_tensor_unscale_norm returns the norm of the unscaled gradients") {
  for (const auto device : devices()) {
    const auto options = torch::TensorOptions().device(device);
    const auto found_inf = torch::zeros({}, options);
    std::vector<torch::Tensor> grads = {torch::tensor({6.0f}, options),
                                        torch::tensor({8.0f}, options)};
    const auto result =
        ampfuse::multi_tensor_unscale_norm(grads, found_inf, torch::full({}, 0.5, options));

    CHECK(result.total_norm.item<float>() == 5.0f);
    CHECK(result.norms[1].item<float>() == 4.0f);
    CHECK(grads[0].item<float>() == 3.0f);
    CHECK(result.first_nonfinite.item<int64_t>() == -1);
  }
}

TEST_CASE("multi_tensor_clip scales gradients down to max_norm but never up") {
  for (const auto device : devices()) {
    const auto options = torch::TensorOptions().device(device);
    std::vector<torch::Tensor> grads = {torch::tensor({3.0f, 4.0f}, options)};

    ampfuse::multi_tensor_clip(grads, torch::full({}, 5.0, options), 10.0);
    CHECK(grads[0][0].item<float>() == 3.0f);
    ampfuse::multi_tensor_clip(grads, torch::full({}, 5.0, options), 1.0);
    CHECK(grads[0][0].item<float>() == Approx(0.6f).epsilon(1e-6));
  }
}

TEST_CASE("multi_tensor_unscale writes no gradient if it refuses an argument") {
  const auto grad = torch::full({2}, 4.0);
  const auto found_inf = torch::zeros({});
  CHECK_THROWS_WITH(ampfuse::multi_tensor_unscale({grad}, found_inf, torch::ones({2})),
                    ContainsSubstring("inv_scale") && ContainsSubstring("one element"));
  CHECK_THROWS_WITH(ampfuse::multi_tensor_unscale({grad, torch::ones({1}).expand({3})}, found_inf,
                                                  torch::full({}, 0.5)),
                    ContainsSubstring("tensors[1]"));
  CHECK(grad.eq(4).all().item<bool>());
}
