// A training run in C++ that continues one in Python, or the reverse, through files.
#include <ampfuse/optim.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <fstream>
#include <iterator>

#include "python_classes.h"

namespace {

using Tensors = std::vector<torch::Tensor>;

// Returns gradients of a step, or initial parameters if step is 0. All values are exact in
// bfloat16, so in every dtype.
torch::Tensor numbers(int64_t size, int64_t step) {
  return ((torch::arange(size) * 37 + step * 11) % 101 - 50).to(torch::kDouble) / 64;
}

Tensors load_params(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), {});
  const torch::IValue saved = torch::pickle_load(bytes);
  Tensors params;
  for (const torch::IValue& param : saved.toTupleRef().elements()) {
    params.push_back(param.toTensor());
  }
  return params;
}

void save_params(const Tensors& params, const std::string& file) {
  // torch.load with weights_only=True accepts a tuple of tensors from C++, but not a list.
  const auto tuple = c10::ivalue::Tuple::create({params.begin(), params.end()});
  const std::vector<char> bytes = torch::pickle_save(tuple);
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

Tensors first_params() {
  Tensors params;
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    params.push_back(numbers(1000, 0).to(dtype));
  }
  return params;
}

// Takes the steps numbered first … last. It loads parameters and optimizer from files in `folder`,
// unless `first` is 1, and saves them there. test_optim_archive.py does the same in Python. A new
// optimizer of torch then takes one step with the last gradients and is saved too.
void take_steps(const std::string& folder, int first, int last) {
  const Tensors params = first == 1 ? first_params() : load_params(folder + "/params.pt");
  for (const auto& param : params) param.requires_grad_();

  const auto options = ampfuse::AdamWOptions(1e-2).amsgrad(true).max_grad_norm(1.0);
  const auto of_group =
      ampfuse::AdamWOptions(1e-3).weight_decay(0.1).max_grad_norm(0.5).master_weights(
          ampfuse::MasterWeights::kRemainder);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{params[0], params[1]});
  groups.emplace_back(Tensors{params[2]}, std::make_unique<ampfuse::AdamWOptions>(of_group));
  ampfuse::AdamW optimizer(groups, options);
  if (first > 1) torch::load(optimizer, folder + "/optimizer.pt");

  for (int step = first; step <= last; ++step) {
    for (const auto& param : params) {
      param.mutable_grad() = numbers(param.numel(), step).to(param.scalar_type());
    }
    optimizer.step();
  }
  save_params(params, folder + "/params.pt");
  torch::save(optimizer, folder + "/optimizer.pt");

  torch::optim::AdamW theirs(params, torch::optim::AdamWOptions(0.25).amsgrad(true));
  theirs.step();
  torch::save(theirs, folder + "/torch_optimizer.pt");
}

}  // namespace

void bind_optim_exchange(py::module_& m) {
  m.def("take_steps", &take_steps);
}
