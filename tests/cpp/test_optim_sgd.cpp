// ampfuse::SGD: steps like torch's, with masters, scaling and archives.

#include <ampfuse/ampfuse.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "checkpoint_folder.h"
#include "optim_models.h"

namespace {

using ampfuse::MasterWeights;
using ampfuse::SGD;
using ampfuse::SGDOptions;
using TorchSGD = torch::optim::SGD;
using TorchSGDOptions = torch::optim::SGDOptions;

ampfuse::SGDParamState& sgd_state_of(torch::optim::Optimizer& optimizer,
                                     const torch::Tensor& param) {
  return static_cast<ampfuse::SGDParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

const torch::Tensor& torch_momentum_of(TorchSGD& optimizer, const torch::Tensor& param) {
  const auto& state = *optimizer.state().at(param.unsafeGetTensorImpl());
  return static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer();
}

SGDOptions& sgd_options_of(torch::optim::Optimizer& optimizer) {
  return static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
}

// Takes a step that is skipped.
void skip(SGD& optimizer, const Tensors& params) {
  feed(params, 100);
  optimizer.found_inf = torch::ones({}, params[0].device());
  optimizer.step();
  optimizer.found_inf.reset();
}

std::string archive_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream archive;
  torch::save(optimizer, archive);
  return archive.str();
}

void load(torch::optim::Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

}  // namespace

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
      scaler.scale(torch::ones({}, device));
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

TEST_CASE("a loaded SGD continues with the same bits") {
  const auto [dtype, options] = GENERATE(
      std::tuple(torch::kFloat, SGDOptions(0.5)),
      std::tuple(torch::kDouble, SGDOptions(0.5).momentum(0.9).dampening(0.25)),
      std::tuple(torch::kHalf, SGDOptions(0.5)),
      std::tuple(torch::kBFloat16,
                 SGDOptions(0.5).momentum(0.9).master_weights(MasterWeights::kRemainder)),
      std::tuple(torch::kBFloat16,
                 SGDOptions(0.5).momentum(0.9).nesterov(true).momentum_dtype(torch::kBFloat16)));
  const auto params = parameters(torch::kCPU, dtype);
  SGD optimizer(params, options);
  train(optimizer, params, 1, 3);
  const auto resumed_params = copies(params);
  SGD resumed(resumed_params, SGDOptions(0.1)
                                  .master_weights(options.master_weights())
                                  .momentum_dtype(options.momentum_dtype()));
  const std::string archive = archive_of(optimizer);
  load(resumed, archive);
  CHECK((archive_of(resumed) == archive));
  CHECK(sgd_options_of(resumed) == options);
  train(optimizer, params, 4, 6);
  train(resumed, resumed_params, 4, 6);

  check_same_bits(resumed.master_params(), optimizer.master_params());
  check_same_bits(resumed_params, params);
}

TEST_CASE("torch's SGD reads our archive, and ours reads torch's") {
  const double momentum = GENERATE(0.0, 0.9);
  const auto params = parameters(torch::kCPU);
  SGD ours(params, SGDOptions(0.1).momentum(momentum));
  train(ours, params, 1, 2);
  const auto others = copies(params);
  TorchSGD theirs(others, TorchSGDOptions(0.5));
  load(theirs, archive_of(ours));
  const auto back_params = copies(params);
  SGD back(back_params, SGDOptions(0.5));
  load(back, archive_of(theirs));

  CHECK(theirs.param_groups()[0].options().get_lr() == 0.1);
  CHECK(sgd_options_of(back) == SGDOptions(0.1).momentum(momentum));
  if (momentum == 0) {
    CHECK(theirs.state().empty());
    CHECK(back.state().empty());
  } else {
    const auto& momentum_buffer = sgd_state_of(ours, params[0]).momentum_buffer();
    CHECK(same_bits(torch_momentum_of(theirs, others[0]), momentum_buffer));
    CHECK(sgd_state_of(back, back_params[0]).step().item<float>() == 1);
  }
  train(ours, params, 3, 4);
  train(theirs, others, 3, 4);
  train(back, back_params, 3, 4);
  check_same_bits(back_params, params);
  check_near(others, params, 0.1);
}

TEST_CASE("a momentum that has not started is not saved") {
  const auto params = parameters(torch::kCPU);
  const auto options = SGDOptions(0.1).momentum(0.9).dampening(0.5);
  SGD ours(params, options);
  skip(ours, params);
  const auto theirs_params = copies(params);
  TorchSGD theirs(theirs_params, TorchSGDOptions(0.5));
  load(theirs, archive_of(ours));
  CHECK(theirs.state().empty());
  train(theirs, theirs_params, 1, 2);
  train(ours, params, 1, 2);
  check_near(theirs_params, params, 0.1);

  // The master is saved, without the momentum.
  const auto narrow = parameters(torch::kCPU, torch::kHalf);
  SGD with_masters(narrow, options);
  skip(with_masters, narrow);
  SGD loaded(narrow, options);
  load(loaded, archive_of(with_masters));
  CHECK_FALSE(sgd_state_of(loaded, narrow[0]).momentum_buffer().defined());
  CHECK(sgd_state_of(loaded, narrow[0]).master_param().defined());
}

TEST_CASE("SGD refuses an archive of another optimizer, and loads nothing") {
  const auto params = parameters(torch::kCPU);
  SGD optimizer(params, SGDOptions(0.25).momentum(0.9));
  train(optimizer, params, 1, 1);
  torch::optim::RMSprop rmsprop(copies(params), torch::optim::RMSpropOptions(0.5).momentum(0.9));
  ampfuse::AdamW adamw(copies(params));
  for (const auto& archive : {archive_of(rmsprop), archive_of(adamw)}) {
    CHECK_THROWS_WITH(load(optimizer, archive), ContainsSubstring("expected an archive of SGD"));
    CHECK(sgd_options_of(optimizer).lr() == 0.25);
    CHECK(sgd_state_of(optimizer, params[0]).step().item<float>() == 1);
  }
  CHECK_THROWS_WITH(load(adamw, archive_of(optimizer)),
                    ContainsSubstring("expected an archive of Adam or AdamW"));
  SGD smaller({torch::ones({33})}, SGDOptions(0.25));
  CHECK_THROWS_WITH(load(smaller, archive_of(optimizer)), ContainsSubstring("a different size"));
  SGD misshapen(copies({params[0].t(), params[1], params[2], params[3]}), SGDOptions(0.25));
  CHECK_THROWS_WITH(load(misshapen, archive_of(optimizer)),
                    ContainsSubstring("momentum_buffer of parameter 0 of group 0: expected shape"));
  CHECK(misshapen.state().empty());
}

TEST_CASE("SGD goes on from a checkpoint, also from one of torch's SGD", "[checkpoint]") {
  const auto [dtype, skips] =
      GENERATE(std::tuple(torch::kFloat, false), std::tuple(torch::kFloat, true),
               std::tuple(torch::kBFloat16, true));
  const ampfuse::Folder folder;
  const auto options = SGDOptions(0.1).momentum(0.9).dampening(0.5);
  const auto params = parameters(torch::kCPU, dtype);
  SGD saved(params, options);
  if (skips) {
    skip(saved, params);
  } else {
    train(saved, params, 1, 2);
  }
  ampfuse::checkpoint::save(folder.path, 1, {{"optimizer", saved}});
  const auto loaded_params = copies(params);
  SGD loaded(loaded_params, SGDOptions(0.5));
  ampfuse::checkpoint::load(folder.path, {{"optimizer", loaded}});
  CHECK(sgd_options_of(loaded) == options);
  train(saved, params, 3, 4);
  train(loaded, loaded_params, 3, 4);
  check_same_bits(loaded_params, params);
  check_same_bits(loaded.master_params(), saved.master_params());
  if (dtype != torch::kFloat) {
    // torch's SGD could not step a state that has a master, but no momentum.
    TorchSGD theirs(loaded_params, TorchSGDOptions(0.5));
    ampfuse::checkpoint::load(folder.path, {{"optimizer", theirs}});
    CHECK(theirs.state().empty());
    return;
  }

  const auto theirs_params = copies(params);
  TorchSGD theirs(theirs_params, TorchSGDOptions(0.5));
  ampfuse::checkpoint::save(folder.path, 2, {{"optimizer", saved}});
  ampfuse::checkpoint::load(folder.path, {{"optimizer", theirs}});
  ampfuse::checkpoint::save(folder.path, 3, {{"optimizer", theirs}});
  ampfuse::checkpoint::load(folder.path, {{"optimizer", loaded}});
  train(saved, params, 5, 6);
  train(theirs, theirs_params, 5, 6);
  train(loaded, loaded_params, 5, 6);
  check_near(theirs_params, params, 0.1);
  check_same_bits(loaded_params, params);
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
          "momentum_dtype: expected float32 or bfloat16, got float16");
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
        "write_back_grads=false)");
}
