// Groups a list of tensors by dtype, and calls typed code with the C++ type of each dtype.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstddef>
#include <vector>

#include "../math/complex.h"
#include "../tensors/tensor_run.h"
#include "multi_tensor.cuh"

namespace ampfuse {

struct DtypeGroup {
  c10::ScalarType dtype;
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
void dispatch_real(c10::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return run.template operator()<c10::Half>();
    case c10::ScalarType::BFloat16:
      return run.template operator()<c10::BFloat16>();
    case c10::ScalarType::Float:
      return run.template operator()<float>();
    default:
      return run.template operator()<double>();
  }
}

/// Calls run.operator()<T>() with the type that kernels use for a real or complex dtype.
template <typename Run>
void dispatch_any(c10::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case c10::ScalarType::ComplexFloat:
      return run.template operator()<math::Complex<float>>();
    case c10::ScalarType::ComplexDouble:
      return run.template operator()<math::Complex<double>>();
    default:
      return dispatch_real(dtype, run);
  }
}

/// Calls launch.operator()<scalar_t>(table) for each table of each dtype. Complex tensors must be
/// passed as real ones of twice the size.
template <typename Table, typename Launch>
void for_each_table(const std::vector<TensorRun>& runs, const Launch& launch) {
  for (const DtypeGroup& group : dtype_groups(runs)) {
    dispatch_real(group.dtype, [&]<typename scalar_t>() {
      auto builder = build_tables<Table>(
          [&](const Table& table) { launch.template operator()<scalar_t>(table); });
      for (const TensorRun& run : group.runs) builder.add({run.data}, run.size);
      builder.flush();
    });
  }
}

}  // namespace ampfuse
