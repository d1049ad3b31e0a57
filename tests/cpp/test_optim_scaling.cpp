// Unscaling, clipping and skipping inside a step of ampfuse::AdamW.

#include <ampfuse/clip_grad.h>

#include <cmath>
#include <limits>

#include "optim_models.h"

using ampfuse::AdamWOptions;

TEST_CASE("max_grad_norm steps as after clip_grad_norm_ but keeps the gradients") {
  for (const auto device : devices()) {
    const auto inside = parameters(device);
    const auto outside = copies(inside);
    ampfuse::AdamW clipping(inside, AdamWOptions().max_grad_norm(0.5).eps(1e-2));
    ampfuse::AdamW plain(outside, AdamWOptions().eps(1e-2));
    feed(inside, 1);
    feed(outside, 1);
    clipping.step();
    const auto norm = ampfuse::clip_grad_norm_(outside, 0.5);
    plain.step();

    // The fused step does not round the clipped gradient: it differs by 2⁻²⁴ of an update of 1e-3.
    for (size_t i = 0; i < inside.size(); ++i) {
      CHECK(torch::allclose(inside[i], outside[i], 1e-6, 1e-9));
    }
    CHECK(same_bits(clipping.grad_norm(), norm));
    feed(outside, 1);
    check_same_bits(gradients_of(inside), gradients_of(outside));
  }
}

TEST_CASE("the shared limit covers all groups except groups with their own limit") {
  // Gradients are ones, with norms 2, 4, 10 and 1. The shared norm is that of the first and the
  // third. An infinite limit does not clip.
  Tensors params;
  for (const int64_t size : {4, 16, 100, 1}) {
    params.push_back(torch::zeros({size}).requires_grad_());
    params.back().mutable_grad() = torch::ones({size});
  }
  const auto options = AdamWOptions().write_back_grads(true);
  const auto limited = [&](double limit) { return AdamWOptions(options).max_grad_norm(limit); };
  ampfuse::AdamW optimizer(
      {group_of(params[0], options), group_of(params[1], limited(1)), group_of(params[2], options),
       group_of(params[3], limited(std::numeric_limits<double>::infinity()))},
      AdamWOptions().max_grad_norm(1.0));
  optimizer.step();

  CHECK(optimizer.grad_norm().item<float>() == Approx(std::sqrt(104.0)));
  CHECK(params[0].grad()[0].item<float>() == Approx(1 / std::sqrt(104.0)));
  CHECK(params[1].grad()[0].item<float>() == Approx(1 / 4.0));
  CHECK(params[2].grad()[0].item<float>() == Approx(1 / std::sqrt(104.0)));
  CHECK(params[3].grad()[0].item<float>() == 1);
}

TEST_CASE("grad_norm is undefined without a limit and before the first step") {
  const auto params = parameters(torch::kCPU);
  ampfuse::AdamW clipping(params, AdamWOptions().max_grad_norm(0.5));
  ampfuse::AdamW plain(params);
  CHECK_FALSE(clipping.grad_norm().defined());
  train(plain, params, 1, 1);
  CHECK_FALSE(plain.grad_norm().defined());
  train(clipping, params, 1, 1);
  CHECK(clipping.grad_norm().item<float>() > 0);
  clipping.zero_grad();
  clipping.step();
  CHECK(clipping.grad_norm().item<float>() == 0);  // a step without gradients
  clipping.max_grad_norm = std::nullopt;
  CHECK_FALSE(clipping.grad_norm().defined());
}

TEST_CASE("grad_norm is that of the gradients when those of the first device are missing") {
  if (devices().size() < 2) return;
  const torch::Tensor on_cpu = torch::ones({2});
  const torch::Tensor on_gpu = torch::ones({2}, torch::kCUDA);
  ampfuse::AdamW optimizer({on_cpu, on_gpu}, AdamWOptions().max_grad_norm(0.5));
  on_gpu.mutable_grad() = torch::full({2}, 3.0, torch::kCUDA);
  optimizer.step();
  CHECK(optimizer.grad_norm().item<float>() == Approx(std::sqrt(18.0)));
}

TEST_CASE("scaled gradients with grad_scale step like unscaled ones") {
  const auto limit = GENERATE(std::optional<double>(), std::optional<double>(0.5));
  for (const auto device : devices()) {
    const auto scaled = parameters(device, torch::kBFloat16);
    const auto unscaled = copies(scaled);
    ampfuse::AdamW ours(scaled, AdamWOptions().max_grad_norm(limit));
    ampfuse::AdamW reference(unscaled, AdamWOptions().max_grad_norm(limit));
    ours.grad_scale = torch::full({}, 1024.0f, device);
    ours.found_inf = torch::zeros({}, device);
    for (int step = 1; step <= 5; ++step) {
      feed(scaled, step, 1024);
      feed(unscaled, step);
      ours.step();
      reference.step();
    }

    check_same_bits(ours.master_params(), reference.master_params());
    if (limit) CHECK(same_bits(ours.grad_norm(), reference.grad_norm()));
  }
}

TEST_CASE("found_inf and a scale without a finite inverse skip the step and its counter") {
  const auto [found_inf, scale] =
      GENERATE(std::tuple(1.0f, 1.0f), std::tuple(2.0f, 1.0f), std::tuple(3.0f, 1.0f),
               std::tuple(0.0f, 0.0f), std::tuple(0.0f, 0x1p-149f), std::tuple(0.0f, 0x1p-128f));
  for (const auto device : devices()) {
    const auto params = parameters(device, torch::kBFloat16);
    const auto before = copies(params);
    const auto unskipped = copies(params);
    ampfuse::AdamW optimizer(params);
    ampfuse::AdamW reference(unskipped);
    optimizer.found_inf = torch::full({1}, found_inf, device);
    optimizer.grad_scale = torch::full({}, scale, device);
    feed(params, 1, found_inf == 0 ? 1 : std::numeric_limits<double>::infinity());
    optimizer.step();

    check_same_bits(params, before);
    CHECK(state_of(optimizer, params[0]).step().item<float>() == 0);

    optimizer.found_inf.reset();
    optimizer.grad_scale.reset();
    train(optimizer, params, 2, 2);
    train(reference, unskipped, 2, 2);
    check_same_bits(optimizer.master_params(), reference.master_params());
    CHECK(state_of(optimizer, params[0]).step().item<float>() == 1);
  }
}

TEST_CASE("with grad_scale but no found_inf the step checks gradients itself") {
  const auto limit = GENERATE(std::optional<double>(), std::optional<double>(0.5));
  for (const auto device : devices()) {
    const auto params = parameters(device);
    const auto before = copies(params);
    const auto unlimited = AdamWOptions().max_grad_norm(std::numeric_limits<double>::infinity());
    ampfuse::AdamW optimizer({group_of(params[0], unlimited), Tensors{params[2]}},
                             AdamWOptions().max_grad_norm(limit));
    optimizer.grad_scale = torch::full({}, 2.0f, device);
    for (const auto& bad : {params[0], params[2]}) {
      feed(params, 1);
      bad.grad().view(-1)[0] = std::nanf("");
      optimizer.step();
    }
    check_same_bits(params, before);

    train(optimizer, params, 2, 2);
    CHECK_FALSE(torch::equal(params[0], before[0]));
    CHECK(state_of(optimizer, params[2]).step().item<float>() == 1);
  }
}

TEST_CASE("write_back_grads stores the unscaled gradients") {
  const auto params = parameters(torch::kCPU);
  ampfuse::Adam optimizer(params, ampfuse::AdamOptions().write_back_grads(true));
  optimizer.grad_scale = torch::full({}, 4.0f);
  feed(params, 1, 4);
  optimizer.step();
  const auto unscaled = copies(params);
  feed(unscaled, 1);

  check_same_bits(gradients_of(params), gradients_of(unscaled));
}
