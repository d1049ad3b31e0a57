// Parameters that other code than ampfuse::AdamW writes: their masters take over the new values.

#include <ampfuse/optim.h>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;
using ampfuse::MasterWeights;

// Returns an optimizer that has taken one step and has learning rate 0 from then on.
ampfuse::AdamW still(const Tensors& params) {
  ampfuse::AdamW optimizer(params, AdamWOptions(0.01).weight_decay(0));
  train(optimizer, params, 1, 1);
  optimizer.param_groups()[0].options().set_lr(0);
  return optimizer;
}

torch::Tensor half_param(torch::Device device, torch::Dtype dtype) {
  torch::manual_seed(0);
  return torch::randn({300}).to(device, dtype).requires_grad_();
}

}  // namespace

TEST_CASE("values written into a parameter survive a step and reach its master") {
  const auto dtype = GENERATE(torch::kHalf, torch::kBFloat16);
  const int write = GENERATE(0, 1, 2);
  for (const auto device : devices()) {
    const auto param = half_param(device, dtype);
    ampfuse::AdamW optimizer = still({param});
    for (const double number : {3.0, 5.0}) {
      const auto value = torch::full_like(param, number).detach();
      if (write == 0) {
        const torch::NoGradGuard no_grad;
        param.copy_(value);
      } else if (write == 1) {
        param.data().copy_(value);
      } else {
        torch::Tensor(param).set_data(value.clone());
      }
      train(optimizer, {param}, 2, 2);

      CHECK(same_bits(param, value));
      CHECK(same_bits(optimizer.master_params()[0], value.to(torch::kFloat)));
    }
  }
}

TEST_CASE("elements that were not written keep the bits of their masters") {
  for (const auto device : devices()) {
    const auto param = half_param(device, torch::kBFloat16);
    ampfuse::AdamW optimizer = still({param});
    const auto before = optimizer.master_params()[0].clone();
    {
      const torch::NoGradGuard no_grad;
      param.slice(0, 100, 110).zero_();
    }
    train(optimizer, {param}, 2, 2);

    before.slice(0, 100, 110).zero_();
    CHECK(same_bits(optimizer.master_params()[0], before));
  }
}

TEST_CASE("setting a parameter with a remainder to 0 or infinity gives no NaN") {
  const double number = GENERATE(0.0, -0.0, INFINITY, -INFINITY);
  for (const auto device : devices()) {
    const auto param = half_param(device, torch::kBFloat16);
    ampfuse::AdamW optimizer(
        {param}, AdamWOptions(0.01).weight_decay(0).master_weights(MasterWeights::kRemainder));
    train(optimizer, {param}, 1, 1);
    CHECK((state_of(optimizer, param).master_param() < 0).any().item<bool>());
    param.data().fill_(number);

    CHECK_FALSE(optimizer.master_params()[0].isnan().any().item<bool>());
    train(optimizer, {param}, 2, 2);
    CHECK_FALSE(param.isnan().any().item<bool>());
  }
}

TEST_CASE("a loss scale without a finite inverse skips the step") {
  const float scale = GENERATE(0.0f, 0x1p-149f, 0x1p-128f);
  for (const auto device : devices()) {
    const auto param = half_param(device, torch::kFloat);
    ampfuse::AdamW optimizer({param});
    train(optimizer, {param}, 1, 1);
    const auto before = param.detach().clone();
    feed({param}, 2);
    optimizer.grad_scale = torch::full({}, scale, torch::TensorOptions(device));
    optimizer.step();

    CHECK(same_bits(param, before));
    CHECK(state_of(optimizer, param).step().item<float>() == 1);
  }
}
