// The pybind11 module ampfuse._C: functions that are not operators. They compute nothing from the
// elements of tensors. Those of list_queries.h read attributes of many tensors in one call.
#include <ampfuse/build_info.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "../linear/linear_cross_entropy_workspace.h"
#include "../ops/cross_entropy_target_check.h"
#include "list_queries.h"
#include "operator_call.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] {
    const ampfuse::BuildInfo info = ampfuse::build_info();
    return py::dict(
        py::arg("version") = info.version, py::arg("torch_version") = info.torch_version,
        py::arg("cuda_version") = info.cuda_version, py::arg("cuda_archs") = info.cuda_archs,
        py::arg("compiler") = info.compiler, py::arg("build_type") = info.build_type,
        py::arg("cpu_capability") = info.cpu_capability);
  });
  m.def("has_cuda", &ampfuse::has_cuda);
  m.def("check_targets", torch::wrap_pybind_function(&ampfuse::check_targets));
  m.def("grads_and_kinds", torch::wrap_pybind_function(&ampfuse::grads_and_kinds));
  m.def("ordinary_grads", torch::wrap_pybind_function(&ampfuse::ordinary_grads));
  m.def("writes", torch::wrap_pybind_function(&ampfuse::writes));
  m.def("linear_cross_entropy_workspace", &ampfuse::linear_cross_entropy_workspace,
        py::arg("hidden"), py::arg("weight"), py::kw_only(), py::arg("dtype"),
        py::arg("logits_dtype"), py::arg("weight_grad_dtype"), py::arg("chunk_rows"),
        py::arg("chunk_classes"), py::arg("with_gradient"), py::arg("on_gpu"));
  using ampfuse::OperatorCall;
  py::class_<OperatorCall>(m, "OperatorCall")
      .def(py::init<py::object>())
      .def("__call__", torch::wrap_pybind_function(&OperatorCall::operator()));
}
