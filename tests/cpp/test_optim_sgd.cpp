// ampfuse::SGD: steps like torch's, with masters and scaling.

#include <cmath>
#include <limits>

#include "sgd_models.h"

TEST_CASE("SGD steps like torch's SGD") {
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  const auto [momentum, dampening, nesterov] =
      GENERATE(std::tuple(0.0, 0.0, false), std::tuple(0.9, 0.0, false), std::tuple(0.9, 0.0, true),
               std::tuple(0.9, 0.25, false), std::tuple(0.5, 1.0, false));
  const double weight_decay = GENERATE(0.0, 0.1);
  CAPTURE(momentum, dampening, nesterov, weight_decay);
  for (const auto device : devices()) {
    const auto ours = parameters(device, dtype);
    const auto theirs = copies(ours, torch::kDouble);
    const auto set = [&](auto options) {
      return options.momentum(momentum).dampening(dampening).nesterov(nesterov).weight_decay(
          weight_decay);
    };
    SGD optimizer(ours, set(SGDOptions(1e-2)));
    TorchSGD reference(theirs, set(TorchSGDOptions(1e-2)));
    train(optimizer, ours, 1, 10);
    train(reference, theirs, 1, 10);

    check_near(ours, theirs, 1e-2);
  }
}

TEST_CASE("SGD with maximize steps as with the negated gradient") {
  const auto ours = parameters(torch::kCPU);
  const auto mirrored = copies(ours);
  SGD up(ours, SGDOptions(0.1).momentum(0.9).maximize(true));
  SGD down(mirrored, SGDOptions(0.1).momentum(0.9));
  for (int step = 1; step <= 2; ++step) {
    feed(ours, step, -1);
    feed(mirrored, step);
    up.step();
    down.step();
  }

  check_same_bits(ours, mirrored);
}

TEST_CASE("SGD keeps only the state that its steps need") {
  const auto params = parameters(torch::kCPU);
  SGD plain(params, SGDOptions(0.1));
  train(plain, params, 1, 1);
  CHECK(plain.state().empty());

  const auto narrow = parameters(torch::kCPU, torch::kBFloat16);
  SGD with_masters(narrow, SGDOptions(0.1));
  train(with_masters, narrow, 1, 2);
  const auto& state = sgd_state_of(with_masters, narrow[0]);
  CHECK(state.step().item<float>() == 0);  // no moment has a step
  CHECK(state.master_param().scalar_type() == torch::kFloat);
  CHECK_FALSE(state.momentum_buffer().defined());

  const Tensors mixed = {params[0], torch::ones({8}, torch::kDouble).requires_grad_()};
  SGD with_momentum(mixed, SGDOptions(0.1).momentum(0.9).momentum_dtype(torch::kBFloat16));
  train(with_momentum, mixed, 1, 1);
  CHECK(sgd_state_of(with_momentum, mixed[0]).momentum_buffer().scalar_type() == torch::kBFloat16);
  CHECK(sgd_state_of(with_momentum, mixed[1]).momentum_buffer().scalar_type() == torch::kDouble);
}

TEST_CASE("a 16-bit model with masters equals the float model under SGD, rounded") {
  const auto [dtype, masters] = GENERATE(std::tuple(torch::kHalf, MasterWeights::kAuto),
                                         std::tuple(torch::kBFloat16, MasterWeights::kRemainder));
  const double momentum = GENERATE(0.0, 0.9);
  for (const auto device : devices()) {
    const auto narrow = parameters(device, dtype);
    const auto wide = copies(narrow, torch::kFloat);
    const auto options = SGDOptions(1e-3).momentum(momentum).weight_decay(0.1);
    SGD optimizer(narrow, SGDOptions(options).master_weights(masters));
    SGD reference(wide, options);
    train(optimizer, narrow, 1, 10);
    train(reference, wide, 1, 10);

    check_same_bits(optimizer.master_params(), wide);
    if (masters == MasterWeights::kAuto) check_same_bits(narrow, copies(wide, dtype));
  }
}

TEST_CASE("masters of SGD adopt what other code writes") {
  const auto params = parameters(torch::kCPU, torch::kHalf);
  SGD optimizer(params, SGDOptions(0.0).momentum(0.9));
  train(optimizer, params, 1, 1);
  fill(params[0], 3);
  train(optimizer, params, 2, 2);

  CHECK(torch::equal(optimizer.master_params()[0], torch::full({33, 5}, 3.0)));
}

TEST_CASE("momentum starts at the first step that is not skipped") {
  for (const auto device : devices()) {
    const auto params = parameters(device);
    const auto others = copies(params);
    const auto options = SGDOptions(0.1).momentum(0.9).dampening(0.5);
    SGD optimizer(params, options);
    SGD reference(others, options);
    skip(optimizer, params);
    sgd_state_of(optimizer, params[0]).momentum_buffer().fill_(NAN);  // its values have no meaning
    skip(optimizer, params);
    check_same_bits(params, others);
    train(optimizer, params, 1, 3);
    train(reference, others, 1, 3);

    check_same_bits(params, others);
    CHECK(sgd_state_of(optimizer, params[0]).step().item<float>() == 3);
  }
}

TEST_CASE("momentum that is switched on later starts with a gradient") {
  const auto params = parameters(torch::kCPU, torch::kHalf);
  SGD optimizer(params, SGDOptions(0.1));
  train(optimizer, params, 1, 2);
  const auto others = optimizer.master_params();
  const auto wide = copies(others);
  sgd_options_of(optimizer).momentum(0.9).dampening(0.5);
  SGD reference(wide, SGDOptions(0.1).momentum(0.9).dampening(0.5));
  train(optimizer, params, 3, 4);
  train(reference, wide, 3, 4);

  check_same_bits(optimizer.master_params(), wide);
}

TEST_CASE("steps without momentum do not start one whose first step was skipped") {
  const auto params = parameters(torch::kCPU, torch::kHalf);
  SGD optimizer(params, SGDOptions(0.1).momentum(0.9).dampening(0.5));
  skip(optimizer, params);
  sgd_options_of(optimizer).momentum(0);
  train(optimizer, params, 1, 2);
  const auto wide = copies(optimizer.master_params());
  sgd_options_of(optimizer).momentum(0.9);
  SGD reference(wide, SGDOptions(0.1).momentum(0.9).dampening(0.5));
  train(optimizer, params, 3, 4);
  train(reference, wide, 3, 4);

  check_same_bits(optimizer.master_params(), wide);
}

TEST_CASE("each group of SGD steps by its own options") {
  const auto params = parameters(torch::kCPU);
  const auto alone = copies(params);
  const auto other = SGDOptions(0.2).momentum(0.5).weight_decay(0.1);
  SGD optimizer({Tensors{params[0]}, group_of(params[2], other)}, SGDOptions(0.1));
  SGD first({alone[0]}, SGDOptions(0.1));
  SGD second({alone[2]}, other);
  train(optimizer, params, 1, 2);
  for (int step = 1; step <= 2; ++step) {
    feed(alone, step);
    first.step();
    second.step();
  }

  check_same_bits(params, alone);
}

TEST_CASE("a scaler unscales, clips and skips in the step of SGD") {
  for (const auto device : devices()) {
    const auto params = parameters(device);
    const auto others = copies(params);
    const auto options = SGDOptions(0.1).momentum(0.9);
    SGD optimizer(params, SGDOptions(options).max_grad_norm(0.5));
    SGD reference(others, options);
    ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().init_scale(64).device(device));
    const auto step_scaled = [&](int number, bool overflow) {
      const double scale = scaler.get_scale();
      feed(params, number, scale);
      const Tensors before = gradients_of(params);
      if (overflow) params[2].grad()[7] = std::numeric_limits<float>::infinity();
      std::ignore = scaler.scale(torch::ones({}, device));
      scaler.step(optimizer);
      scaler.update();
      CHECK(scaler.was_skipped() == overflow);
      check_same_bits(gradients_of(params), before);  // the step writes no gradient
    };
    step_scaled(100, /*overflow=*/true);
    for (int number = 1; number <= 3; ++number) {
      step_scaled(number, /*overflow=*/false);
      feed(others, number);
      const auto norm = ampfuse::clip_grad_norm_(others, 0.5);
      reference.step();
      CHECK(optimizer.grad_norm().item<float>() == Approx(norm.item<float>()));
    }

    // The fused step does not round the clipped gradient: it differs by 2⁻²⁴ of an update of 0.1.
    for (size_t i = 0; i < params.size(); ++i) {
      CHECK(torch::allclose(params[i], others[i], 1e-6, 1e-7));
    }
  }
}

TEST_CASE("options of SGD that are out of range are refused") {
  const auto params = parameters(torch::kCPU);
  const auto refuses = [&](const SGDOptions& options, const std::string& words) {
    CHECK_THROWS_WITH(SGD(params, options), ContainsSubstring(words));
  };
  refuses(SGDOptions(-1), "Invalid learning rate: -1");
  refuses(SGDOptions(1).momentum(-0.5), "Invalid momentum value: -0.5");
  refuses(SGDOptions(1).momentum(INFINITY), "Invalid momentum value: inf");
  refuses(SGDOptions(1).dampening(NAN), "Invalid dampening value: nan");
  refuses(SGDOptions(1).weight_decay(-1), "Invalid weight_decay value: -1");
  refuses(SGDOptions(1).nesterov(true), "Nesterov momentum requires a momentum and zero dampening");
  refuses(SGDOptions(1).nesterov(true).momentum(0.9).dampening(0.1), "zero dampening");
  refuses(SGDOptions(1).momentum_dtype(torch::kHalf),
          "momentum_dtype: expected float32, bfloat16 or int8 for 8 bits, got float16");
  CHECK_THROWS_WITH(
      SGD(std::vector<torch::optim::OptimizerParamGroup>(), SGDOptions(1).nesterov(true)),
      ContainsSubstring("Nesterov momentum"));
  refuses(SGDOptions(1).max_grad_norm(-1), "max_grad_norm: expected None or at least 0, got -1");

  // A schedule may switch the momentum off, as in torch.
  const auto others = copies(params);
  SGD nesterov(params, SGDOptions(1).nesterov(true).momentum(0.9));
  SGD plain(others, SGDOptions(1));
  sgd_options_of(nesterov).momentum(0);
  train(nesterov, params, 1, 1);
  train(plain, others, 1, 1);
  check_same_bits(params, others);

  CHECK_THROWS_WITH(SGD({group_of(params[0], TorchSGDOptions(0.1))}, SGDOptions(1)),
                    ContainsSubstring("options of group 0: expected ampfuse::SGDOptions"));
  SGD optimizer(params, SGDOptions(0.1).momentum(0.9));
  feed(params, 1);
  params[2].mutable_grad() = torch::ones_like(params[2]).to_sparse();
  CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring("SGD does not support sparse gradients"));
  CHECK(optimizer.state().empty());
}

TEST_CASE("options of SGD are compared and printed") {
  CHECK(SGDOptions(0.5).momentum(0.9) == SGDOptions(0.5).momentum(0.9));
  CHECK(!(SGDOptions(0.5).momentum(0.9) == SGDOptions(0.5)));
  std::ostringstream text;
  text << SGDOptions(0.5).momentum(0.9).nesterov(true).max_grad_norm(2);
  CHECK(text.str() ==
        "ampfuse::SGDOptions(lr=0.5, momentum=0.9, dampening=0, weight_decay=0, nesterov=true, "
        "maximize=false, master_weights=kAuto, momentum_dtype=Float, max_grad_norm=2, "
        "write_back_grads=false, ema_dtype=Float, seed=0)");
}
