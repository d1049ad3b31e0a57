// The objects that checkpoints of C++ hold: models, any optimizer, schedulers; and saves in the
// background.
#include <type_traits>

#include "checkpoint_folder.h"
#include "torch_catch.h"
#include "training.h"

using namespace ampfuse;
namespace fs = std::filesystem;

namespace {

using checkpoint::Object;
using checkpoint::Objects;

// Each of these would keep a reference to an object that is gone or elsewhere.
static_assert(!std::is_constructible_v<Object, torch::optim::SGD>);
static_assert(!std::is_constructible_v<Object, GradScaler>);
static_assert(!std::is_constructible_v<Object, torch::optim::ReduceLROnPlateauScheduler&>);
static_assert(!std::is_copy_constructible_v<Objects> && !std::is_move_constructible_v<Objects>);

/// A model with an optimizer that is made by a function of its parameters.
template <typename Make>
struct Run {
  explicit Run(const Make& make) : model(4, 3), optimizer(make(model->parameters())) {}

  void step(uint64_t seed) {
    torch::manual_seed(seed);
    const at::Tensor input = torch::randn({5, 4});
    optimizer->step([&] {
      optimizer->zero_grad();
      const at::Tensor loss = model->forward(input).square().mean();
      loss.backward();
      return loss;
    });
  }

  torch::nn::Linear model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

template <typename Make>
void check_goes_on(const Make& make) {
  const Folder folder;
  Run<Make> first(make);
  for (uint64_t i = 0; i < 3; ++i) first.step(i);
  checkpoint::save(folder.path, 3, {{"model", first.model}, {"optimizer", *first.optimizer}});
  Run<Make> second(make);
  second.step(9);
  second.optimizer->param_groups()[0].options().set_lr(0.5);
  checkpoint::load(folder.path, {{"model", second.model}, {"optimizer", *second.optimizer}});
  CHECK(second.optimizer->param_groups()[0].options().get_lr() == 0.05);
  for (uint64_t i = 3; i < 6; ++i) {
    first.step(i);
    second.step(i);
  }
  CHECK(same_tensors(first.model->parameters(), second.model->parameters()));
}

template <typename Optimizer, typename Options>
auto maker(const Options& options) {
  return [options](const std::vector<at::Tensor>& params) {
    // The second group has options of its own.
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{params[0]});
    groups.emplace_back(std::vector<at::Tensor>{params[1]}, std::make_unique<Options>(options));
    return std::make_unique<Optimizer>(groups, options);
  };
}

}  // namespace

TEST_CASE("a checkpoint keeps the model whose holder is assigned to", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(2, 2);
  const at::Tensor weight = model->weight.detach().clone();
  const Objects objects = {{"model", model}};
  model = torch::nn::Linear(3, 3);
  checkpoint::save(folder.path, 1, objects);
  torch::nn::Linear loaded(2, 2);
  checkpoint::load(folder.path, {{"model", loaded}});
  CHECK(at::equal(loaded->weight, weight));
}

TEST_CASE("a load of more than models warns of what is left in the checkpoint", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  GradScaler scaler;
  checkpoint::save(folder.path, 1,
                   {{"model", model}, {"optimizer", optimizer}, {"scaler", scaler}});
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  checkpoint::load(folder.path, {{"model", model}});
  CHECK(warnings.messages.empty());
  checkpoint::load(folder.path, {{"model", model}, {"optimizer", optimizer}});
  REQUIRE(warnings.messages.size() == 1);
  CHECK_THAT(warnings.messages[0], ContainsSubstring("it has scaler, too, which is not loaded"));
  checkpoint::load(folder.path, {{"model", model}, {"scaler", scaler}});
  REQUIRE(warnings.messages.size() == 2);
  CHECK_THAT(warnings.messages[1], ContainsSubstring("it has optimizer, too, which is not loaded"));
}

TEST_CASE("objects that cannot be held are refused", "[checkpoint]") {
  torch::nn::LinearImpl on_the_stack(2, 2);
  CHECK_THAT(error_of([&] { Object object(on_the_stack); }),
             ContainsSubstring("a model on the stack or in its constructor"));
  CHECK_THAT(error_of([&] { Object object(std::shared_ptr<torch::nn::LinearImpl>{}); }),
             ContainsSubstring("expected a model that a ModuleHolder or a std::shared_ptr owns"));
  torch::nn::Linear model(2, 2);
  Object of_a_reference(static_cast<torch::nn::Module&>(*model));
  CHECK(std::get<0>(of_a_reference.get()) == model.ptr());

  const Folder folder;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const Objects objects = {{"optimizer", optimizer}};
  const torch::optim::SGD moved = std::move(optimizer);
  CHECK_THAT(error_of([&] { checkpoint::save(folder.path, 1, objects); }),
             ContainsSubstring("was it moved from?"));
}

TEST_CASE("training with optimizers of torch goes on bit for bit", "[checkpoint]") {
  using namespace torch::optim;
  check_goes_on(
      maker<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true)));
  check_goes_on(maker<torch::optim::SGD>(torch::optim::SGDOptions(0.05)));
  check_goes_on(maker<torch::optim::Adam>(torch::optim::AdamOptions(0.05).amsgrad(true)));
  check_goes_on(maker<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05).weight_decay(0.1)));
  check_goes_on(maker<RMSprop>(RMSpropOptions(0.05).momentum(0.5).centered(true)));
  check_goes_on(maker<Adagrad>(AdagradOptions(0.05).lr_decay(0.1)));
  check_goes_on([](const std::vector<at::Tensor>& params) {
    return std::make_unique<LBFGS>(params, LBFGSOptions(0.05).line_search_fn("strong_wolfe"));
  });
}

TEST_CASE("a parameter without stored state has none after a load", "[checkpoint]") {
  const Folder folder;
  Run run(maker<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9)));
  checkpoint::save(folder.path, 0, {{"optimizer", *run.optimizer}});
  run.step(0);
  checkpoint::load(folder.path, {{"optimizer", *run.optimizer}});
  CHECK(run.optimizer->state().empty());
}

TEST_CASE("states of other parameters or optimizers are refused", "[checkpoint]") {
  const Folder folder;
  const auto make = maker<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));
  Run run(make);
  run.step(0);
  checkpoint::save(folder.path, 1, {{"optimizer", *run.optimizer}});
  const auto check_refused = [&](torch::optim::Optimizer& other, const std::string& message) {
    CHECK_THAT(error_of([&] { checkpoint::load(folder.path, {{"optimizer", other}}); }),
               ContainsSubstring(message));
  };
  const auto others = make({torch::zeros({3, 5}), torch::zeros({3})});
  check_refused(*others,
                "momentum_buffer of parameter 0 has shape [3, 4] in the checkpoint, and the "
                "parameter has [3, 5]");
  CHECK(others->state().empty());
  torch::optim::RMSprop rmsprop(run.model->parameters());
  check_refused(rmsprop, "the checkpoint has the state of SGD, not of RMSprop");

  struct Own : torch::optim::SGD {
    using SGD::SGD;
    void save(torch::serialize::OutputArchive&) const override {}
  } own(run.model->parameters(), torch::optim::SGDOptions(0.1));
  CHECK_THAT(error_of([&] { checkpoint::save(folder.path, 1, {{"optimizer", own}}); }),
             ContainsSubstring("expected an optimizer whose save() writes what those of torch"));
}

TEST_CASE("a scheduler goes on from a checkpoint", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
  torch::optim::StepLR scheduler(optimizer, 3, 0.5);
  for (int i = 0; i < 5; ++i) scheduler.step();
  checkpoint::save(folder.path, 5, {{"optimizer", optimizer}, {"scheduler", scheduler}});

  torch::optim::SGD other(model->parameters(), torch::optim::SGDOptions(1.0));
  torch::optim::StepLR loaded(other, 3, 0.5);
  checkpoint::load(folder.path, {{"optimizer", other}, {"scheduler", loaded}});
  for (int i = 0; i < 10; ++i) {
    scheduler.step();
    loaded.step();
    CHECK(other.param_groups()[0].options().get_lr() ==
          optimizer.param_groups()[0].options().get_lr());
  }
  CHECK(optimizer.param_groups()[0].options().get_lr() == 0.0625);
}

TEST_CASE("a save in the background has the state of its call", "[checkpoint]") {
  const Folder folder;
  CheckpointedTraining first(0, "masters");
  first.run(3);
  auto saving = checkpoint::save_in_background(folder.path, 3, first.objects(),
                                               checkpoint::SaveOptions().values("three"));
  const auto losses = first.run(3);
  CHECK(saving.path().filename() == "step-00000003");
  const fs::path path = saving.wait();
  CHECK(path == checkpoint::verify(folder.path));
  CHECK(saving.done());
  CheckpointedTraining second(1, "masters");
  CHECK(checkpoint::load(folder.path, second.objects()).values.toStringRef() == "three");
  CHECK(second.run(3) == losses);
}

TEST_CASE("a save waits for the one in the background, and so does the destructor",
          "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(500, 500);
  auto saving = checkpoint::save_in_background(folder.path, 1, {{"model", model}});
  checkpoint::save(folder.path, 2, {{"model", model}});
  CHECK(folder.names() == std::vector<std::string>{"step-00000001", "step-00000002"});
  saving = checkpoint::save_in_background(folder.path, 3, {{"model", model}});
  {
    const auto last = std::move(saving);
  }
  CHECK(folder.names().size() == 3);
}

TEST_CASE("wait throws the error of a save in the background", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(2, 2);
  const auto not_utf8 = checkpoint::SaveOptions().values(std::string("caf\xe9"));
  auto saving = checkpoint::save_in_background(folder.path, 1, {{"model", model}}, not_utf8);
  CHECK_THAT(error_of([&] { saving.wait(); }), ContainsSubstring("expected texts in UTF-8"));
  CHECK(saving.done());
  CHECK(folder.names().empty());
  for (const std::string run : {"/proc/run", ""}) {
    CHECK_THAT(error_of([&] { static_cast<void>(checkpoint::save_in_background(run, 1, {})); }),
               ContainsSubstring(run + ": the checkpoint of step 1 could not be written"));
  }
}
