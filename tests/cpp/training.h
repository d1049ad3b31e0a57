// A small training program, whose state is saved and loaded. tests/python/support/checkpointed.py
// computes the same.
#pragma once

#include <ampfuse/ampfuse.h>
#include <torch/nn.h>
#include <torch/utils.h>

namespace ampfuse {

struct CheckpointedTraining {
  /// kind: "float32", or "masters", "remainders" or "8 bits" of a bfloat16 model.
  CheckpointedTraining(int64_t seed, const std::string& kind)
      : model(made(seed, kind)),
        optimizer(model->parameters(), options_of(kind)),
        scaler(GradScalerOptions().device(at::kCPU).growth_interval(3).history(8)) {}

  static AdamWOptions options_of(const std::string& kind) {
    AdamWOptions options(0.05);
    if (kind == "remainders") options.master_weights(MasterWeights::kRemainder);
    if (kind == "8 bits") {
      options.master_weights(MasterWeights::kStochastic).state_dtype(at::kChar).ema(0.9);
    }
    return options;
  }

  static torch::nn::Sequential made(int64_t seed, const std::string& kind) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16),
                                torch::nn::Dropout(0.3), torch::nn::ReLU(),
                                torch::nn::Linear(16, 4));
    if (kind != "float32") model->to(at::kBFloat16);
    return model;
  }

  checkpoint::Objects objects() {
    return {{"model", model}, {"optimizer", optimizer}, {"scaler", scaler}};
  }

  double backward() {
    const auto dtype = model->parameters()[0].scalar_type();
    const at::Tensor output = model->forward(at::randn({16, 8}).to(dtype));
    const at::Tensor loss = (output.to(at::kFloat) - at::rand({16, 4})).square().mean();
    scaler.scale(loss).backward();
    return loss.item<double>();
  }

  void step() {
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }

  std::vector<double> run(int64_t steps) {
    std::vector<double> losses;
    for (int64_t i = 0; i < steps; ++i) {
      losses.push_back(backward());
      step();
    }
    return losses;
  }

  /// Returns weights, buffers and moments.
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> result;
    std::map<std::string, at::Tensor> of_model;
    for (const auto& param : model->named_parameters()) of_model[param.key()] = param.value();
    for (const auto& buffer : model->named_buffers()) of_model[buffer.key()] = buffer.value();
    for (const auto& [name, tensor] : of_model) {
      // C++ models count batches in the dtype of their weights, Python's in int64.
      const bool is_count = name.ends_with("num_batches_tracked");
      result.push_back(tensor.detach().to(is_count ? at::kLong : tensor.scalar_type()));
    }
    for (const at::Tensor& param : model->parameters()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& state = static_cast<const AdamParamState&>(*found->second);
      for (const at::Tensor& one :
           {state.step(), state.exp_avg(), state.exp_avg_units(), state.exp_avg_sq(),
            state.exp_avg_sq_units(), state.master_param(), state.ema_param()}) {
        if (one.defined()) result.push_back(one);
      }
    }
    return result;
  }

  torch::nn::Sequential model;
  AdamW optimizer;
  GradScaler scaler;
};

}  // namespace ampfuse
