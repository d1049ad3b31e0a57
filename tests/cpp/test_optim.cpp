// ampfuse::Adam and AdamW step like torch's, with the options of each group.

#include <ampfuse/ampfuse.h>

#include <sstream>

#include "optim_models.h"

namespace {

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
  const auto no_decay = ampfuse::AdamWOptions(1e-2).weight_decay(0);
  const auto l2 = ampfuse::AdamOptions(1e-1).weight_decay(0.5);
  ampfuse::AdamW optimizer(
      {Tensors{params[0]}, group_of(params[1], no_decay), group_of(params[2], l2)},
      ampfuse::AdamWOptions(1e-3));
  train(optimizer, {params[0], params[1], params[2]}, 1, 2);

  ampfuse::AdamW first({alone[0]}, ampfuse::AdamWOptions(1e-3));
  ampfuse::AdamW second({alone[1]}, no_decay);
  ampfuse::Adam third({alone[2]}, l2);
  for (int step = 1; step <= 2; ++step) {
    feed(alone, step);
    first.step();
    second.step();
    third.step();
  }
  check_same_bits(params, alone);
}

TEST_CASE("an added group keeps its own options, and only the optimizer has max_grad_norm") {
  const auto params = parameters(torch::kCPU);
  ampfuse::AdamW optimizer({params[0]}, ampfuse::AdamWOptions(1e-3).max_grad_norm(0.5));
  optimizer.add_param_group(group_of(params[2], ampfuse::AdamOptions(1e-1).eps(1e-6)));

  const auto& added =
      dynamic_cast<const ampfuse::AdamOptions&>(optimizer.param_groups()[1].options());
  CHECK(added.lr() == 1e-1);
  CHECK(added.eps() == 1e-6);
  CHECK(optimizer.max_grad_norm == 0.5);
  CHECK_FALSE(options_of(optimizer).max_grad_norm().has_value());
  CHECK_FALSE(added.max_grad_norm().has_value());
}

TEST_CASE("learning rate and weight decay may become negative, as in torch") {
  const auto params = parameters(torch::kCPU);
  const auto others = copies(params, torch::kDouble);
  ampfuse::AdamW optimizer(params, ampfuse::AdamWOptions(1e-2));
  torch::optim::AdamW reference(others, torch::optim::AdamWOptions(1e-2));
  const auto change = [](auto& options) { options.lr(-1e-2).weight_decay(-0.5); };
  change(options_of(optimizer));
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

TEST_CASE("options are compared and printed") {
  const auto options = ampfuse::AdamWOptions(0.5).max_grad_norm(2);
  CHECK(options == ampfuse::AdamWOptions(0.5).max_grad_norm(2));
  CHECK(!(options == ampfuse::AdamWOptions(0.5)));
  CHECK(!(ampfuse::AdamOptions() == ampfuse::AdamOptions().betas({0.9, 0.99})));
  std::ostringstream text;
  text << options << ampfuse::AdamOptions().master_weights(ampfuse::MasterWeights::kRemainder);
  CHECK(text.str() ==
        "ampfuse::AdamWOptions(lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, "
        "amsgrad=false, maximize=false, master_weights=kAuto, state_dtype=Float, max_grad_norm=2, "
        "write_back_grads=false, ema_dtype=Float, seed=0)"
        "ampfuse::AdamOptions(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, "
        "amsgrad=false, maximize=false, master_weights=kRemainder, state_dtype=Float, "
        "write_back_grads=false, ema_dtype=Float, seed=0)");
}
