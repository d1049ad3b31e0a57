// ampfuse::Adam and AdamW step like torch's, and 16-bit parameters step like float ones.

#include <ampfuse/ampfuse.h>

#include "optim_models.h"

namespace {

// Compares two runs of 20 steps that round differently. A step rounds a float parameter about
// twice, each time by 2⁻²⁴ of it. It rounds the update, at most 10·lr, about ten times. Doubles
// have 29 more bits.
void check_near(const Tensors& params, const Tensors& expected, double lr) {
  const double unit = 20 * (params[0].scalar_type() == torch::kFloat ? 0x1p-24 : 0x1p-53);
  for (size_t i = 0; i < params.size(); ++i) {
    CHECK(torch::allclose(params[i].to(torch::kDouble), expected[i], 4 * unit, 100 * lr * unit));
  }
}

// The reference is torch's own class, in double. The case of a large eps fails if eps enters the
// formula in another position.
template <typename Ours, typename Theirs, typename OurOptions, typename TheirOptions>
void check_follows_torch(torch::Dtype dtype) {
  const auto [lr, eps, weight_decay, amsgrad] =
      GENERATE(std::tuple(1e-3, 1e-8, 0.0, false), std::tuple(1e-2, 1e-3, 0.3, false),
               std::tuple(1e-2, 1e-8, 0.1, true));
  const std::tuple<double, double> betas = {0.8, 0.99};
  for (const auto device : devices()) {
    const auto ours = parameters(device, dtype);
    const auto theirs = copies(ours, torch::kDouble);
    Ours optimizer(
        ours, OurOptions(lr).betas(betas).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad));
    Theirs reference(
        theirs, TheirOptions(lr).betas(betas).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad));
    train(optimizer, ours, 1, 20);
    train(reference, theirs, 1, 20);

    check_near(ours, theirs, lr);
  }
}

}  // namespace

TEST_CASE("AdamW steps like torch's AdamW") {
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  check_follows_torch<ampfuse::AdamW, torch::optim::AdamW, ampfuse::AdamWOptions,
                      torch::optim::AdamWOptions>(dtype);
}

TEST_CASE("Adam steps like torch's Adam, which adds weight decay to the gradient") {
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  check_follows_torch<ampfuse::Adam, torch::optim::Adam, ampfuse::AdamOptions,
                      torch::optim::AdamOptions>(dtype);
}

TEST_CASE("maximize steps as with the negated gradient") {
  const auto ours = parameters(torch::kCPU);
  const auto mirrored = copies(ours);
  ampfuse::Adam up(ours, ampfuse::AdamOptions().maximize(true));
  ampfuse::Adam down(mirrored);
  feed(ours, 1, -1);
  feed(mirrored, 1);
  up.step();
  down.step();

  check_same_bits(ours, mirrored);
}

TEST_CASE("AdamW trains a tiny bfloat16 model") {
  for (const auto device : devices()) {
    torch::manual_seed(3);
    torch::nn::Linear model(4, 1);
    model->to(device, torch::kBFloat16);
    const auto input = torch::randn({32, 4}).to(device, torch::kBFloat16);
    const auto target = input.sum(1, /*keepdim=*/true);
    const auto loss = [&] { return (model->forward(input) - target).square().mean(); };
    const float before = loss().item<float>();
    ampfuse::AdamW optimizer(model->parameters(),
                             ampfuse::AdamWOptions(1e-1).weight_decay(0.01).max_grad_norm(1.0));
    for (int step = 0; step < 50; ++step) {
      const auto returned = optimizer.step([&] {
        optimizer.zero_grad();
        const auto of_step = loss();
        of_step.backward();
        return of_step;
      });
      REQUIRE(returned.defined());
    }

    CHECK(loss().item<float>() < before / 10);
  }
}

TEST_CASE("a 16-bit model with masters equals the float model, rounded") {
  using ampfuse::MasterWeights;
  const auto [dtype, master_weights] =
      GENERATE(std::tuple(torch::kHalf, MasterWeights::kAuto),
               std::tuple(torch::kBFloat16, MasterWeights::kAuto),
               std::tuple(torch::kBFloat16, MasterWeights::kRemainder));
  for (const auto device : devices()) {
    const auto narrow = parameters(device, dtype);
    const auto wide = copies(narrow, torch::kFloat);
    const auto options = ampfuse::AdamWOptions(1e-3).betas({0.8, 0.99});
    ampfuse::AdamW optimizer(narrow, ampfuse::AdamWOptions(options).master_weights(master_weights));
    ampfuse::AdamW reference(wide, options);
    train(optimizer, narrow, 1, 20);
    train(reference, wide, 1, 20);

    check_same_bits(optimizer.master_params(), wide);
    if (master_weights == MasterWeights::kAuto) check_same_bits(narrow, copies(wide, dtype));
    CHECK(state_of(optimizer, narrow[0]).exp_avg().scalar_type() == torch::kFloat);
  }
}

TEST_CASE("small updates of bfloat16 parameters are lost without masters") {
  const Tensors params = {torch::ones({8}, torch::dtype(torch::kBFloat16).requires_grad(true))};
  ampfuse::Adam optimizer(params,
                          ampfuse::AdamOptions(1e-4).master_weights(ampfuse::MasterWeights::kOff));
  train(optimizer, params, 1, 20);

  CHECK(torch::equal(params[0], torch::ones_like(params[0])));
  CHECK_FALSE(state_of(optimizer, params[0]).master_param().defined());
  CHECK(optimizer.master_params()[0].is_same(params[0]));
}

TEST_CASE("state_dtype sets the dtype of moments, but moments of doubles stay double") {
  const Tensors params = {torch::ones({8}).requires_grad_(),
                          torch::ones({8}, torch::kDouble).requires_grad_()};
  ampfuse::Adam optimizer(params,
                          ampfuse::AdamOptions().amsgrad(true).state_dtype(torch::kBFloat16));
  train(optimizer, params, 1, 1);

  CHECK(state_of(optimizer, params[0]).exp_avg_sq().scalar_type() == torch::kBFloat16);
  CHECK(state_of(optimizer, params[1]).max_exp_avg_sq().scalar_type() == torch::kDouble);
}

TEST_CASE("amsgrad and state_dtype may be set after the first step") {
  const auto params = parameters(torch::kCPU);
  const auto others = copies(params);
  ampfuse::Adam optimizer(params);
  ampfuse::Adam reference(others);
  train(optimizer, params, 1, 1);
  train(reference, others, 1, 1);
  auto& options = static_cast<ampfuse::AdamOptions&>(optimizer.param_groups()[0].options());
  options.amsgrad(true).state_dtype(torch::kBFloat16);
  static_cast<ampfuse::AdamOptions&>(reference.param_groups()[0].options()).amsgrad(true);
  train(optimizer, params, 2, 3);
  train(reference, others, 2, 3);

  check_same_bits(params, others);
  CHECK(state_of(optimizer, params[0]).max_exp_avg_sq().scalar_type() == torch::kFloat);
}

TEST_CASE("complex parameters step like pairs of real ones") {
  const auto complex = torch::randn({5}, torch::kComplexFloat).requires_grad_();
  const auto real = torch::view_as_real(complex.detach()).clone().requires_grad_();
  complex.mutable_grad() = torch::randn({5}, torch::kComplexFloat);
  real.mutable_grad() = torch::view_as_real(complex.grad()).clone();
  ampfuse::AdamW({complex}).step();
  ampfuse::AdamW({real}).step();

  CHECK(same_bits(torch::view_as_real(complex.detach()), real));
}

TEST_CASE("parameters without a gradient are not changed and get no state") {
  const auto params = parameters(torch::kCPU);
  const auto before = copies(params);
  ampfuse::AdamW optimizer(params);
  params[0].mutable_grad() = torch::ones_like(params[0]);
  optimizer.step();

  CHECK_FALSE(torch::equal(params[0], before[0]));
  CHECK(same_bits(params[2], before[2]));
  CHECK(optimizer.state().size() == 1);
}

TEST_CASE("each group steps by its own options and its own kind of weight decay") {
  const auto params = parameters(torch::kCPU);
  const auto alone = copies(params);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{params[0]});
  groups.emplace_back(Tensors{params[1]}, std::make_unique<ampfuse::AdamWOptions>(
                                              ampfuse::AdamWOptions(1e-2).weight_decay(0)));
  groups.emplace_back(Tensors{params[2]}, std::make_unique<ampfuse::AdamOptions>(
                                              ampfuse::AdamOptions(1e-1).weight_decay(0.5)));
  ampfuse::AdamW optimizer(groups, ampfuse::AdamWOptions(1e-3));
  train(optimizer, {params[0], params[1], params[2]}, 1, 2);

  ampfuse::AdamW first({alone[0]}, ampfuse::AdamWOptions(1e-3));
  ampfuse::AdamW second({alone[1]}, ampfuse::AdamWOptions(1e-2).weight_decay(0));
  ampfuse::Adam third({alone[2]}, ampfuse::AdamOptions(1e-1).weight_decay(0.5));
  for (int step = 1; step <= 2; ++step) {
    feed(alone, step);
    first.step();
    second.step();
    third.step();
  }
  check_same_bits(params, alone);
}

TEST_CASE("an added group keeps its own options") {
  const auto params = parameters(torch::kCPU);
  ampfuse::AdamW optimizer({params[0]}, ampfuse::AdamWOptions(1e-3));
  optimizer.add_param_group(
      {{params[2]}, std::make_unique<ampfuse::AdamOptions>(ampfuse::AdamOptions(1e-1).eps(1e-6))});

  const auto* options =
      dynamic_cast<const ampfuse::AdamOptions*>(&optimizer.param_groups()[1].options());
  REQUIRE(options != nullptr);
  CHECK(options->lr() == 1e-1);
  CHECK(options->eps() == 1e-6);
}

TEST_CASE("learning rate and weight decay may become negative, as in torch") {
  const auto params = parameters(torch::kCPU);
  const auto others = copies(params, torch::kDouble);
  ampfuse::AdamW optimizer(params, ampfuse::AdamWOptions(1e-2));
  torch::optim::AdamW reference(others, torch::optim::AdamWOptions(1e-2));
  const auto change = [](auto& options) { options.lr(-1e-2).weight_decay(-0.5); };
  change(static_cast<ampfuse::AdamWOptions&>(optimizer.param_groups()[0].options()));
  change(static_cast<torch::optim::AdamWOptions&>(reference.param_groups()[0].options()));
  train(optimizer, params, 1, 5);
  train(reference, others, 1, 5);

  check_near(params, others, 1e-2);
}

TEST_CASE("torch's schedulers change the learning rate of a step") {
  const auto scheduled = parameters(torch::kCPU);
  const auto params = copies(scheduled);
  ampfuse::AdamW optimizer(scheduled, ampfuse::AdamWOptions(1e-2));
  ampfuse::AdamW reference(params, ampfuse::AdamWOptions(1e-3));
  torch::optim::StepLR schedule(optimizer, /*step_size=*/1, /*gamma=*/0.1);
  schedule.step();
  schedule.step();  // torch's first call does not change the rate
  const double lr = optimizer.param_groups()[0].options().get_lr();
  reference.param_groups()[0].options().set_lr(lr);
  train(optimizer, scheduled, 1, 1);
  train(reference, params, 1, 1);

  CHECK(lr == Approx(1e-3));
  check_same_bits(scheduled, params);
}
