// Parameters, their gradients for each step, and comparisons, for the tests of optimizers.
#pragma once

#include <ampfuse/optim.h>

#include "torch_catch.h"

using Tensors = std::vector<torch::Tensor>;

inline Tensors copies(const Tensors& params, torch::Dtype dtype) {
  Tensors copies;
  for (const auto& param : params) {
    copies.push_back(param.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
    copies.back().set_requires_grad(true);
  }
  return copies;
}

inline Tensors copies(const Tensors& params) {
  return copies(params, params[0].scalar_type());
}

/// Returns parameters whose values are exact in bfloat16. One is longer than the CPU's unit of work
/// of 8192 elements, one is 0-dim and one has no element.
inline Tensors parameters(torch::Device device, torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(7);
  Tensors params;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{33, 5}, {}, {8193}, {0, 4}}) {
    params.push_back(torch::randn(shape).to(torch::kBFloat16).to(device));
  }
  return copies(params, dtype);
}

/// Sets the gradients of a step. Their values are exact in bfloat16, so in every dtype.
inline void feed(const Tensors& params, int step, double scale = 1) {
  torch::manual_seed(step);
  for (const auto& param : params) {
    const auto grad = torch::randn(param.sizes()).to(torch::kBFloat16).to(torch::kDouble);
    param.mutable_grad() = (grad * scale).to(param.device(), param.scalar_type());
  }
}

/// Takes the steps numbered `first` … `last`.
inline void train(torch::optim::Optimizer& optimizer, const Tensors& params, int first, int last) {
  for (int step = first; step <= last; ++step) {
    feed(params, step);
    optimizer.step();
  }
}

/// Writes to a parameter, or a part of it, as other code than the optimizer does.
inline void fill(torch::Tensor param, double value) {
  const torch::NoGradGuard no_grad;
  param.fill_(value);
}

/// Compares bits. torch::equal would take 0 and −0 for equal, and a NaN for unequal to itself.
inline bool same_bits(const torch::Tensor& tensor, const torch::Tensor& other) {
  if (tensor.scalar_type() != other.scalar_type()) return false;
  const auto as_bytes = [](const torch::Tensor& t) {
    return t.detach().cpu().contiguous().reshape({-1}).view(torch::kByte);
  };
  return tensor.sizes() == other.sizes() && torch::equal(as_bytes(tensor), as_bytes(other));
}

inline void check_same_bits(const Tensors& tensors, const Tensors& others) {
  REQUIRE(tensors.size() == others.size());
  for (size_t i = 0; i < tensors.size(); ++i) CHECK(same_bits(tensors[i], others[i]));
}

/// Compares two runs of at most 20 steps that round differently. A step rounds a float parameter
/// about twice, each time by 2⁻²⁴ of it. It rounds the update, at most 10·lr, about ten times.
/// Doubles have 29 more bits.
inline void check_near(const Tensors& params, const Tensors& expected, double lr) {
  const double unit = 20 * (params[0].scalar_type() == torch::kFloat ? 0x1p-24 : 0x1p-53);
  for (size_t i = 0; i < params.size(); ++i) {
    CHECK(torch::allclose(params[i].to(torch::kDouble), expected[i].to(torch::kDouble), 4 * unit,
                          100 * lr * unit));
  }
}

inline ampfuse::AdamParamState& state_of(torch::optim::Optimizer& optimizer,
                                         const torch::Tensor& param) {
  return static_cast<ampfuse::AdamParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

inline ampfuse::AdamWOptions& options_of(torch::optim::Optimizer& optimizer, size_t group = 0) {
  return static_cast<ampfuse::AdamWOptions&>(optimizer.param_groups()[group].options());
}

template <typename Options>
torch::optim::OptimizerParamGroup group_of(const torch::Tensor& param, const Options& options) {
  return {Tensors{param}, std::make_unique<Options>(options)};
}

inline Tensors gradients_of(const Tensors& params) {
  Tensors gradients;
  for (const auto& param : params) gradients.push_back(param.grad());
  return gradients;
}
