// The host side of ops that change each element of a list independently.
#pragma once

#include <vector>

#include "dispatch.h"
#include "multi_tensor.cuh"

namespace ampfuse {

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
