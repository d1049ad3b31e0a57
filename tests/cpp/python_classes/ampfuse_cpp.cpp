// The Python module ampfuse_cpp: ampfuse's C++ classes, for tests that compare them with Python's.
#include <ampfuse/autocast.h>
#include <ampfuse/grad_scaler.h>
#include <ampfuse/optim.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "python_classes.h"

namespace {

using namespace ampfuse;
using torch::optim::Optimizer;
using Tensors = std::vector<at::Tensor>;

// Wraps a function so that torch's C++ errors become torch's Python exceptions.
template <typename F>
auto wrap(F f) {
  return torch::wrap_pybind_function(std::move(f));
}

// Like wrap, but releases the GIL during the call. A function that waits for other ranks must not
// hold the GIL: torch's threads, on which the ranks wait, need it to release a tensor.
template <typename F>
auto wrap_without_lock(F&& f) {
  return torch::wrap_pybind_function_no_gil(std::forward<F>(f));
}

void bind_optimizers(py::module_& m) {
  py::class_<Optimizer>(m, "Optimizer")
      .def("step", wrap([](Optimizer& self) { self.step(); }))
      .def("zero_grad", wrap([](Optimizer& self) { self.zero_grad(); }));
  py::class_<torch::optim::SGD, Optimizer>(m, "SGD").def(
      py::init([](const Tensors& params, double lr) {
        return torch::optim::SGD(params, torch::optim::SGDOptions(lr));
      }),
      py::arg("params"), py::arg("lr"));
  py::class_<torch::optim::LBFGS, Optimizer>(m, "LBFGS").def(py::init([](const Tensors& params) {
    return torch::optim::LBFGS(params);
  }));
  py::class_<Adam, Optimizer>(m, "Adam")
      .def_readwrite("grad_scale", &Adam::grad_scale)
      .def_readwrite("found_inf", &Adam::found_inf)
      .def_property_readonly("grad_norm", &Adam::grad_norm);
  py::class_<AdamW, Adam>(m, "AdamW")
      .def(py::init([](const Tensors& params, double lr, std::optional<double> max_grad_norm) {
             return AdamW(params, AdamWOptions(lr).max_grad_norm(max_grad_norm));
           }),
           py::arg("params"), py::arg("lr") = 1e-3, py::arg("max_grad_norm") = py::none());
}

GradScaler make_scaler(std::optional<at::Device> device, double init_scale, double growth_factor,
                       double backoff_factor, int64_t growth_interval, bool enabled,
                       std::optional<double> min_scale, std::optional<double> max_scale,
                       int64_t hysteresis, std::string hysteresis_refill, bool dynamic,
                       std::optional<double> skip_outliers,
                       std::optional<int64_t> max_consecutive_skips, int64_t history,
                       c10::intrusive_ptr<c10d::ProcessGroup> process_group, bool allow_fp16_grads,
                       bool allow_no_grads) {
  return GradScaler(GradScalerOptions()
                        .device(device)
                        .init_scale(init_scale)
                        .growth_factor(growth_factor)
                        .backoff_factor(backoff_factor)
                        .growth_interval(growth_interval)
                        .enabled(enabled)
                        .min_scale(min_scale)
                        .max_scale(max_scale)
                        .hysteresis(hysteresis)
                        .hysteresis_refill(std::move(hysteresis_refill))
                        .dynamic(dynamic)
                        .skip_outliers(skip_outliers)
                        .max_consecutive_skips(max_consecutive_skips)
                        .history(history)
                        .process_group(std::move(process_group))
                        .allow_fp16_grads(allow_fp16_grads)
                        .allow_no_grads(allow_no_grads));
}

void update(GradScaler& self, const py::object& new_scale) {
  try {
    if (new_scale.is_none()) {
      self.update();
    } else if (py::isinstance<py::float_>(new_scale)) {
      self.update(new_scale.cast<double>());
    } else {
      self.update(new_scale.cast<at::Tensor>());
    }
  } catch (const ScaleCollapseError& error) {
    py::set_error(py::module_::import("ampfuse").attr("ScaleCollapseError"), error.what());
    throw py::error_already_set();
  }
}

std::vector<std::string> overflow_report(const GradScaler& self, const py::object& model) {
  torch::OrderedDict<std::string, at::Tensor> named_parameters;
  for (const py::handle named : model.attr("named_parameters")()) {
    const auto [name, parameter] = named.cast<std::pair<std::string, at::Tensor>>();
    named_parameters.insert(name, parameter);
  }
  return self.overflow_report(named_parameters);
}

// Converts a value of a state dictionary: a number, a string or None.
py::object to_python(const at::IValue& value) {
  if (value.isBool()) return py::cast(value.toBool());
  if (value.isInt()) return py::cast(value.toInt());
  if (value.isDouble()) return py::cast(value.toDouble());
  if (value.isString()) return py::cast(value.toStringRef());
  return py::none();
}

at::IValue from_python(py::handle value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (value.is_none()) return {};
  return value.cast<at::Tensor>();
}

py::dict state_dict(const GradScaler& self) {
  py::dict entries;
  for (const auto& entry : self.state_dict()) {
    entries[to_python(entry.key())] = to_python(entry.value());
  }
  return entries;
}

void load_state_dict(GradScaler& self, const py::dict& entries) {
  c10::impl::GenericDict converted(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : entries) {
    converted.insert(key.cast<std::string>(), from_python(value));
  }
  self.load_state_dict(converted);
}

py::list history(const GradScaler& self) {
  const py::object record = py::module_::import("ampfuse").attr("ScaleRecord");
  py::list records;
  for (const ScaleRecord& update : self.history()) {
    records.append(record(update.scale, update.skipped, update.norm));
  }
  return records;
}

void bind_grad_scaler(py::module_& m) {
  using py::arg;
  py::class_<GradScaler>(m, "GradScaler")
      .def(py::init(wrap(make_scaler)), arg("device") = py::none(), arg("init_scale") = 65536.0,
           arg("growth_factor") = 2.0, arg("backoff_factor") = 0.5, arg("growth_interval") = 2000,
           arg("enabled") = true, py::kw_only(), arg("min_scale") = py::none(),
           arg("max_scale") = py::none(), arg("hysteresis") = 1,
           arg("hysteresis_refill") = "growth", arg("dynamic") = true,
           arg("skip_outliers") = py::none(), arg("max_consecutive_skips") = py::none(),
           arg("history") = 0, arg("process_group") = c10::intrusive_ptr<c10d::ProcessGroup>(),
           arg("allow_fp16_grads") = false, arg("allow_no_grads") = false)
      .def("scale",
           wrap([](GradScaler& self, const at::Tensor& outputs) { return self.scale(outputs); }))
      .def("scale",
           wrap([](GradScaler& self, const Tensors& outputs) { return self.scale(outputs); }))
      .def("unscale_", wrap_without_lock(&GradScaler::unscale_))
      .def("clip_grad_norm_", wrap_without_lock(&GradScaler::clip_grad_norm_))
      .def("step",
           wrap_without_lock([](GradScaler& self, Optimizer& optimizer) { self.step(optimizer); }))
      .def("update", wrap(update), arg("new_scale") = py::none())
      .def("get_scale", wrap(&GradScaler::get_scale))
      .def("scale_tensor", wrap(&GradScaler::scale_tensor))
      .def("is_enabled", &GradScaler::is_enabled)
      .def_property_readonly("step_skipped", wrap(&GradScaler::step_skipped))
      .def("was_skipped", wrap(&GradScaler::was_skipped))
      .def("history", wrap(history))
      .def("overflow_report", wrap(overflow_report))
      .def("state_dict", wrap(state_dict))
      .def("load_state_dict", wrap(load_state_dict))
      .def("save",
           wrap([](const GradScaler& self, const std::string& file) { torch::save(self, file); }))
      .def("load",
           wrap([](GradScaler& self, const std::string& file) { torch::load(self, file); }));
}

// An AutocastGuard as a context manager.
class AutocastContext {
 public:
  AutocastContext(const std::string& device_type, std::optional<at::ScalarType> dtype, bool enabled,
                  std::optional<bool> cache_enabled)
      : device_type_(at::Device(device_type).type()),
        dtype_(dtype),
        enabled_(enabled),
        cache_enabled_(cache_enabled) {}

  void enter() { guard_.emplace(device_type_, dtype_, enabled_, cache_enabled_); }
  void exit(const py::args&) { guard_.reset(); }

 private:
  at::DeviceType device_type_;
  std::optional<at::ScalarType> dtype_;
  bool enabled_;
  std::optional<bool> cache_enabled_;
  std::optional<AutocastGuard> guard_;
};

void bind_autocast_guard(py::module_& m) {
  py::class_<AutocastContext>(m, "AutocastGuard")
      .def(py::init<const std::string&, std::optional<at::ScalarType>, bool, std::optional<bool>>(),
           py::arg("device_type"), py::arg("dtype") = py::none(), py::arg("enabled") = true,
           py::arg("cache_enabled") = py::none())
      .def("__enter__", wrap(&AutocastContext::enter))
      .def("__exit__", wrap(&AutocastContext::exit))
      .def_static("clear_cache", &AutocastGuard::clear_cache);
}

}  // namespace

PYBIND11_MODULE(ampfuse_cpp, m) {
  bind_optimizers(m);
  bind_grad_scaler(m);
  bind_autocast_guard(m);
  py::module_ checkpoint = m.def_submodule("checkpoint");
  bind_checkpoint(checkpoint);
}
