// The host side of ops that change each element of a list by itself: rounds of distinct tensors,
// stand-ins for strided ones, a group per dtype, tables.
#pragma once

#include <utility>

#include "dispatch.h"
#include "multi_tensor.cuh"
#include "stream.h"

namespace ampfuse {

/// Calls launch.operator()<scalar_t>(stream, table) for each table of each dtype; complex tensors
/// come as real ones of twice the size.
template <typename Table, typename Launch>
void for_each_written_table(const char* op, at::TensorList tensors, const Launch& launch) {
  for_each_distinct(tensors, [&](at::TensorList distinct) {
    if (distinct.empty()) return;
    const LaunchStream stream(distinct[0]);
    const DenseRuns dense(op, distinct, Complex::kAsReal, Use::kWrite);
    for (const DtypeGroup& group : dtype_groups(dense.get())) {
      dispatch_real(group.dtype, [&]<typename scalar_t>() {
        auto builder = build_tables<Table>(
            [&](const Table& table) { launch.template operator()<scalar_t>(stream, table); });
        for (const TensorRun& run : group.runs) builder.add({run.data}, run.size);
        builder.flush();
      });
    }
    dense.write_back();
  });
}

}  // namespace ampfuse
