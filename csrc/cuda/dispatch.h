// From a list of tensors to typed launches: one group per dtype, and the C++ type of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../math/complex.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

struct DtypeGroup {
  at::ScalarType dtype;
  std::vector<TensorRun> runs;
  std::vector<size_t> places;  // of the runs in the list
};

/// Groups in order of appearance, runs in order of the list.
inline std::vector<DtypeGroup> dtype_groups(const std::vector<TensorRun>& runs) {
  std::vector<DtypeGroup> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    auto group = groups.begin();
    while (group != groups.end() && group->dtype != runs[i].dtype) ++group;
    if (group == groups.end()) group = groups.insert(group, {runs[i].dtype, {}, {}});
    group->runs.push_back(runs[i]);
    group->places.push_back(i);
  }
  return groups;
}

/// Calls run.operator()<T>() with the type that kernels have for a real dtype.
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

/// The same for complex dtypes too.
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
