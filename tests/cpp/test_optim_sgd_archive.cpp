// ampfuse::SGD in archives and checkpoints, and its exchange with torch's SGD.
#include <sstream>

#include "checkpoint_folder.h"
#include "sgd_models.h"

namespace {

const torch::Tensor& torch_momentum_of(TorchSGD& optimizer, const torch::Tensor& param) {
  const auto& state = *optimizer.state().at(param.unsafeGetTensorImpl());
  return static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer();
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
