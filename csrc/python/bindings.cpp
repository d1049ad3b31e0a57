// The pybind11 module ampfuse._C: what the dispatcher cannot carry. Whatever computes with tensors
// is an op; EagerOp is a way to call one, and survey.h asks many tensors what Python could ask
// each.
#include <ampfuse/build_info.h>
#include <pybind11/pybind11.h>

#include "eager_op.h"
#include "survey.h"

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
  m.def("grads_and_kinds", &ampfuse::grads_and_kinds);
  m.def("version_sum", &ampfuse::version_sum);
  py::class_<ampfuse::TensorStamp>(m, "TensorStamp")
      .def(py::init<const py::list&>())
      .def("matches", &ampfuse::TensorStamp::matches);
  py::class_<ampfuse::EagerOp>(m, "EagerOp")
      .def(py::init<const std::string&, const std::string&>())
      .def("__call__", &ampfuse::EagerOp::call);
}
