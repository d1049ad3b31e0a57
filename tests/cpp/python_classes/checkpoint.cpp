// A small training program in C++, whose checkpoints Python reads and writes, too.
#include <ampfuse/checkpoint.h>
#include <ampfuse/sgd.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "../training.h"
#include "python_classes.h"

namespace {

// Returns an optimizer. The tests load other options than these.
std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name,
                                                      const std::vector<at::Tensor>& params) {
  if (name == "SGD") return std::make_unique<torch::optim::SGD>(params, 0.5);
  if (name == "ampfuse::SGD") return std::make_unique<ampfuse::SGD>(params, 0.5);
  if (name == "AdamW") return std::make_unique<torch::optim::AdamW>(params);
  if (name == "RMSprop") return std::make_unique<torch::optim::RMSprop>(params);
  return std::make_unique<torch::optim::Adagrad>(params);
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  using ampfuse::CheckpointedTraining;
  namespace checkpoint = ampfuse::checkpoint;
  py::register_exception<checkpoint::Error>(m, "Error", PyExc_RuntimeError);
  py::class_<CheckpointedTraining>(m, "Training")
      .def(py::init<int64_t, std::string>())
      .def("backward", &CheckpointedTraining::backward, py::call_guard<py::gil_scoped_release>())
      .def("step", &CheckpointedTraining::step)
      .def("run", &CheckpointedTraining::run, py::call_guard<py::gil_scoped_release>())
      .def("tensors", &CheckpointedTraining::tensors)
      .def("history",
           [](const CheckpointedTraining& self) {
             std::vector<std::tuple<double, bool, double>> records;
             for (const auto& [scale, skipped, norm] : self.scaler.history()) {
               records.emplace_back(scale, skipped, norm);
             }
             return records;
           })
      .def(
          "save",
          [](CheckpointedTraining& self, const std::string& folder, int64_t step, bool gradients,
             std::optional<int64_t> keep) {
            return checkpoint::save(
                       folder, step, self.objects(),
                       checkpoint::SaveOptions().gradients(gradients).keep(keep).values("from C++"))
                .string();
          },
          py::arg("folder"), py::arg("step"), py::arg("gradients") = false,
          py::arg("keep") = py::none())
      .def("load", [](CheckpointedTraining& self, const std::string& folder) {
        return checkpoint::load(folder, self.objects()).step;
      });
  m.def("verify", [](const std::string& path) { return checkpoint::verify(path).string(); });
  // Loads a model and an optimizer, takes steps, and saves them.
  m.def(
      "train_with",
      [](const std::string& optimizer_name, const std::string& folder, int64_t steps) {
        torch::nn::Linear model(4, 3);
        const auto optimizer = optimizer_of(optimizer_name, model->parameters());
        const checkpoint::Objects objects = {{"model", model}, {"optimizer", *optimizer}};
        const int64_t start = checkpoint::load(folder, objects).step;
        for (int64_t i = 0; i < steps; ++i) {
          optimizer->zero_grad();
          model->forward(at::ones({2, 4})).square().sum().backward();
          optimizer->step();
        }
        checkpoint::save(folder, start + steps, objects);
      },
      py::call_guard<py::gil_scoped_release>());
  // Loads values alone, and saves them again.
  m.def("copy_values", [](const std::string& from, const std::string& to) {
    const auto loaded = checkpoint::load(from, {});
    checkpoint::save(to, loaded.step, {}, checkpoint::SaveOptions().values(loaded.values));
  });
}
