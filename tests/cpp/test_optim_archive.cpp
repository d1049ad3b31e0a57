// ampfuse::AdamW in torch's archives: saved, loaded, and exchanged with torch's own class.

#include <ampfuse/optim.h>

#include <sstream>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;
using ampfuse::MasterWeights;

// Returns the archive.
template <typename From, typename To>
std::string move_state(const From& from, To& to) {
  std::stringstream archive;
  torch::save(from, archive);
  torch::load(to, archive);
  return archive.str();
}

}  // namespace

TEST_CASE("a loaded optimizer continues with the same bits") {
  const auto [dtype, options] = GENERATE(
      std::tuple(torch::kFloat, AdamWOptions().amsgrad(true)),
      std::tuple(torch::kDouble, AdamWOptions()), std::tuple(torch::kHalf, AdamWOptions()),
      std::tuple(torch::kBFloat16, AdamWOptions().master_weights(MasterWeights::kRemainder)),
      std::tuple(torch::kBFloat16, AdamWOptions().state_dtype(torch::kBFloat16)));
  for (const auto device : devices()) {
    const auto params = parameters(device, dtype);
    ampfuse::AdamW optimizer(params, options);
    train(optimizer, params, 1, 5);
    const auto resumed_params = copies(params);
    ampfuse::AdamW resumed(resumed_params, options);
    const std::string archive = move_state(optimizer, resumed);
    CHECK((move_state(resumed, resumed) == archive));  // equal optimizers give equal archives
    train(optimizer, params, 6, 10);
    train(resumed, resumed_params, 6, 10);

    check_same_bits(resumed.master_params(), optimizer.master_params());
    check_same_bits(resumed_params, params);
    const auto& state = state_of(resumed, resumed_params[0]);
    CHECK(state.step().item<float>() == 10);
    CHECK(same_bits(state.exp_avg_sq(), state_of(optimizer, params[0]).exp_avg_sq()));
  }
}

TEST_CASE("loading restores options except state_dtype and master_weights") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  ampfuse::AdamW optimizer(params, AdamWOptions(0.5)
                                       .betas({0.1, 0.2})
                                       .eps(0.3)
                                       .weight_decay(0.4)
                                       .amsgrad(true)
                                       .maximize(true)
                                       .write_back_grads(true)
                                       .state_dtype(torch::kBFloat16)
                                       .max_grad_norm(3.0));
  options_of(optimizer).max_grad_norm(2.0);
  train(optimizer, params, 1, 1);
  const auto others = copies(params);
  ampfuse::AdamW loaded(others, AdamWOptions().master_weights(MasterWeights::kRemainder));
  move_state(optimizer, loaded);

  const auto& options = options_of(loaded);
  CHECK(options.lr() == 0.5);
  CHECK(options.betas() == std::tuple(0.1, 0.2));
  CHECK(options.eps() == 0.3);
  CHECK(options.weight_decay() == 0.4);
  CHECK(options.amsgrad());
  CHECK(options.maximize());
  CHECK(options.write_back_grads());
  CHECK(options.max_grad_norm() == 2.0);
  CHECK(options.state_dtype() == torch::kFloat);
  CHECK(options.master_weights() == MasterWeights::kRemainder);
  CHECK_FALSE(loaded.max_grad_norm.has_value());
  const auto& state = state_of(loaded, others[0]);
  CHECK(state.exp_avg().scalar_type() == torch::kFloat);
  CHECK(state.master_param().scalar_type() == torch::kShort);
}

TEST_CASE("loading converts exactly between float masters and remainders") {
  const auto [from, to] = GENERATE(std::tuple(MasterWeights::kAuto, MasterWeights::kRemainder),
                                   std::tuple(MasterWeights::kRemainder, MasterWeights::kAuto));
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  ampfuse::AdamW optimizer(params, AdamWOptions().master_weights(from));
  train(optimizer, params, 1, 5);
  const auto others = copies(params);
  // Loading float masters as remainders also sets the parameters.
  if (to == MasterWeights::kRemainder) fill(others[0], 0);
  ampfuse::AdamW converted(others, AdamWOptions().master_weights(to));
  move_state(optimizer, converted);

  check_same_bits(others, params);
  check_same_bits(converted.master_params(), optimizer.master_params());
  train(optimizer, params, 6, 10);
  train(converted, others, 6, 10);
  check_same_bits(converted.master_params(), optimizer.master_params());
}

TEST_CASE("loading writes state tensors in place and drops state that was not saved") {
  const auto params = parameters(torch::kCPU, torch::kHalf);
  ampfuse::AdamW optimizer(params);
  train(optimizer, params, 1, 1);
  const auto others = copies(params);
  ampfuse::AdamW loaded(others);
  train(loaded, others, 1, 3);
  const auto exp_avg = state_of(loaded, others[0]).exp_avg();
  const auto master = state_of(loaded, others[0]).master_param();
  auto& options = options_of(loaded);
  optimizer.state().erase(params[1].unsafeGetTensorImpl());
  optimizer.param_groups()[0].options().set_lr(0.25);
  move_state(optimizer, loaded);

  CHECK(state_of(loaded, others[0]).exp_avg().is_same(exp_avg));
  CHECK(same_bits(exp_avg, state_of(optimizer, params[0]).exp_avg()));
  CHECK(state_of(loaded, others[0]).master_param().is_same(master));
  CHECK(options.lr() == 0.25);
  CHECK(loaded.state().count(others[1].unsafeGetTensorImpl()) == 0);
}

TEST_CASE("torch's AdamW reads our archive, and ours reads torch's") {
  const auto params = parameters(torch::kCPU);
  ampfuse::AdamW ours(params, AdamWOptions(1e-2).amsgrad(true));
  train(ours, params, 1, 5);
  const auto others = copies(params);
  torch::optim::AdamW theirs(others);
  move_state(ours, theirs);
  ampfuse::AdamW back(params);
  move_state(theirs, back);

  const auto& state = static_cast<torch::optim::AdamWParamState&>(
      *theirs.state().at(others[0].unsafeGetTensorImpl()));
  CHECK(state.step() == 5);
  CHECK(same_bits(state.exp_avg(), state_of(ours, params[0]).exp_avg()));
  CHECK(same_bits(state_of(back, params[2]).max_exp_avg_sq(),
                  state_of(ours, params[2]).max_exp_avg_sq()));
  CHECK(state_of(back, params[0]).step().item<float>() == 5);
  CHECK(back.param_groups()[0].options().get_lr() == 1e-2);
}

TEST_CASE("masters that an archive lacks are created from the parameters") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  torch::optim::AdamW theirs(params);
  train(theirs, params, 1, 2);
  ampfuse::AdamW ours(params);
  move_state(theirs, ours);
  train(ours, params, 3, 3);

  const auto& state = state_of(ours, params[0]);
  CHECK(state.step().item<float>() == 3);
  CHECK(same_bits(state.master_param().to(torch::kBFloat16), params[0]));
}

TEST_CASE("saved masters have what was written to the parameters after the last step") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  ampfuse::AdamW optimizer(params);
  train(optimizer, params, 1, 2);
  const torch::Tensor before = state_of(optimizer, params[0]).master_param().clone();
  fill(params[0].select(0, 0), 3);
  const auto loaded = copies(params, torch::kBFloat16);
  ampfuse::AdamW other(loaded);
  move_state(optimizer, other);

  const torch::Tensor master = state_of(other, loaded[0]).master_param();
  CHECK(same_bits(loaded[0], params[0]));
  CHECK(master.select(0, 0).eq(3).all().item<bool>());
  CHECK(same_bits(master.slice(0, 1), before.slice(0, 1)));
  CHECK(same_bits(state_of(optimizer, params[0]).master_param(), before));
}

TEST_CASE("AdamW loads an archive of Adam, but Adam refuses one of AdamW") {
  const auto params = parameters(torch::kCPU);
  ampfuse::Adam adam(params);
  ampfuse::AdamW adamw(copies(params));
  CHECK_NOTHROW(move_state(adam, adamw));
  CHECK_THROWS_WITH(
      move_state(adamw, adam),
      ContainsSubstring("decoupled_weight_decay: expected an archive of AdamOptions"));
}

TEST_CASE("an archive of other groups, sizes or shapes is refused as a whole") {
  const Tensors params = {torch::ones({2}).requires_grad_(), torch::ones({3}).requires_grad_()};
  ampfuse::AdamW optimizer(params, AdamWOptions(0.5));
  train(optimizer, params, 1, 1);
  std::stringstream archive;
  torch::save(optimizer, archive);
  const auto load_into = [&](std::vector<torch::optim::OptimizerParamGroup> groups) {
    ampfuse::AdamW other(groups);
    try {
      torch::load(other, archive);
    } catch (const c10::Error& error) {
      CHECK(other.state().empty());
      CHECK(other.param_groups()[0].options().get_lr() == 1e-3);
      return std::string(error.what());
    }
    return std::string("loaded");
  };

  CHECK_THAT(load_into({Tensors{params[0]}, Tensors{params[1]}}),
             ContainsSubstring("a different number of parameter groups"));
  CHECK_THAT(load_into({Tensors{params[0]}}), ContainsSubstring("a different size"));
  CHECK_THAT(
      load_into({Tensors{params[0], torch::ones({3, 1})}}),
      ContainsSubstring("exp_avg of parameter 1 of group 0: expected shape [3, 1], got [3]"));
}

TEST_CASE("an archive of another optimizer is refused, and nothing is loaded") {
  const auto params = parameters(torch::kCPU);
  const double momentum = GENERATE(0.0, 0.9);  // without momentum SGD has no state
  torch::optim::SGD sgd(params, torch::optim::SGDOptions(0.5).momentum(momentum));
  train(sgd, params, 1, 1);
  std::stringstream archive;
  torch::save(sgd, archive);
  ampfuse::AdamW optimizer(params);
  train(optimizer, params, 1, 1);
  CHECK_THROWS_WITH(torch::load(optimizer, archive),
                    ContainsSubstring("expected an archive of Adam or AdamW"));
  CHECK(options_of(optimizer).lr() == 1e-3);
  CHECK(state_of(optimizer, params[0]).step().item<float>() == 1);
}

TEST_CASE("an optimizer with another order of its parameters refuses to exchange their weights") {
  const auto options =
      AdamWOptions().master_weights(GENERATE(MasterWeights::kAuto, MasterWeights::kRemainder));
  Tensors params;
  for (int i = 0; i < 3; ++i) {
    params.push_back(torch::randn({4}).to(torch::kBFloat16).requires_grad_());
    params.back().mutable_grad() = torch::ones_like(params.back());
  }
  ampfuse::AdamW from(params, options);
  from.step();
  Tensors loaded;
  for (const auto& param : params) loaded.push_back(param.detach().clone().requires_grad_());
  ampfuse::AdamW other_order(Tensors{loaded[1], loaded[0], loaded[2]}, options);
  CHECK_THROWS_WITH(move_state(from, other_order),
                    ContainsSubstring("the master of parameter 0 of group 0 is the value of "
                                      "parameter 1 of group 0, and that of parameter 1 of group 0 "
                                      "its own: make the optimizer with its parameters in"));
  for (size_t i = 0; i < params.size(); ++i) CHECK(loaded[i].equal(params[i]));
  CHECK(other_order.state().empty());

  ampfuse::AdamW same_order(loaded, options);
  move_state(from, same_order);
  ampfuse::AdamW new_values(Tensors{torch::randn({4}).to(torch::kBFloat16), loaded[0], loaded[2]},
                            options);
  move_state(from, new_values);  // the model was not loaded before
}
