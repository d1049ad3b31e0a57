// Groups a list of tensors by dtype, and calls typed code with the C++ type of each dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../math/complex.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

struct DtypeGroup {
  at::ScalarType dtype;
  std::vector<TensorRun> runs;
  std::vector<size_t> indices;  // index of each run in the list
};

/// Groups runs by dtype. Groups are in the order of their first run, runs in the order of the list.
inline std::vector<DtypeGroup> dtype_groups(const std::vector<TensorRun>& runs) {
  std::vector<DtypeGroup> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    auto group = groups.begin();
    while (group != groups.end() && group->dtype != runs[i].dtype) ++group;
    if (group == groups.end()) group = groups.insert(group, {runs[i].dtype, {}, {}});
    group->runs.push_back(runs[i]);
    group->indices.push_back(i);
  }
  return groups;
}

/// Calls run.operator()<T>() with the type that kernels use for a real dtype.
template <typename Run>
void dispatch_real(at::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case at::kHalf:
      return run.template operator()<c10::Half>();
    case at::kBFloat16:
      return run.template operator()<c10::BFloat16>();
    case at::kFloat:
      return run.template operator()<float>();
    default:
      return run.template operator()<double>();
  }
}

/// Calls run.operator()<T>() with the type that kernels use for a real or complex dtype.
template <typename Run>
void dispatch_any(at::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case at::kComplexFloat:
      return run.template operator()<math::Complex<float>>();
    case at::kComplexDouble:
      return run.template operator()<math::Complex<double>>();
    default:
      return dispatch_real(dtype, run);
  }
}

}  // namespace ampfuse
