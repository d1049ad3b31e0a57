// A small training program in C++, whose checkpoints Python reads and writes, too.
#include <ampfuse/checkpoint.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/nn.h>

#include "../training.h"
#include "python_classes.h"

void bind_checkpoint(py::module_& m) {
  using ampfuse::Training;
  namespace checkpoint = ampfuse::checkpoint;
  py::register_exception<checkpoint::Error>(m, "Error", PyExc_RuntimeError);
  py::class_<Training>(m, "Training")
      .def(py::init<int64_t, std::string>())
      .def("backward", &Training::backward, py::call_guard<py::gil_scoped_release>())
      .def("step", &Training::step)
      .def("run", &Training::run, py::call_guard<py::gil_scoped_release>())
      .def("tensors", &Training::tensors)
      .def("history",
           [](const Training& self) {
             std::vector<std::tuple<double, bool, double>> records;
             for (const auto& [scale, skipped, norm] : self.scaler.history()) {
               records.emplace_back(scale, skipped, norm);
             }
             return records;
           })
      .def(
          "save",
          [](Training& self, const std::string& folder, int64_t step, bool gradients,
             std::optional<int64_t> keep) {
            return checkpoint::save(
                       folder, step, self.objects(),
                       checkpoint::SaveOptions().gradients(gradients).keep(keep).values("from C++"))
                .string();
          },
          py::arg("folder"), py::arg("step"), py::arg("gradients") = false,
          py::arg("keep") = py::none())
      .def("load", [](Training& self, const std::string& folder) {
        return checkpoint::load(folder, self.objects()).step;
      });
  m.def("verify", [](const std::string& path) { return checkpoint::verify(path).string(); });
  // Loads values alone, and saves them again.
  m.def("copy_values", [](const std::string& from, const std::string& to) {
    const auto loaded = checkpoint::load(from, {});
    checkpoint::save(to, loaded.step, {}, checkpoint::SaveOptions().values(loaded.values));
  });
}
