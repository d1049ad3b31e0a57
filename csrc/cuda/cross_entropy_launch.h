// From a call's arguments to its kernels' and to the teams that take its rows.
#pragma once

#include <limits>

#include "../ops/cross_entropy.h"
#include "cross_entropy.cuh"

namespace ampfuse {

/// Rows up to this long are a warp's: 64 logits for each lane.
inline constexpr int64_t kWarpClasses = 2048;

inline IndexType index_type(const at::Tensor& target) {
  switch (target.scalar_type()) {
    case at::kInt:
      return IndexType::kInt;
    case at::kByte:
      return IndexType::kByte;
    default:
      return IndexType::kLong;
  }
}

/// Probabilities as the arithmetic has them; `kept` keeps a copy alive until it is launched with.
template <typename scalar_t>
CrossEntropyTable<scalar_t> table_of(const CrossEntropyArguments& arguments, at::Tensor& kept) {
  using acc_t = RowAcc<scalar_t>;
  const at::Tensor& input = arguments.input;
  TORCH_CHECK_VALUE(input.size(1) <= std::numeric_limits<int>::max(),
                    "cross_entropy: input: expected fewer than 2^31 classes, got ", input.size(1));
  CrossEntropyTable<scalar_t> table = {};
  table.input = input.const_data_ptr<scalar_t>();
  table.row_stride = input.stride(0);
  table.rows = input.size(0);
  table.classes = static_cast<int>(input.size(1));
  if (arguments.has_probabilities()) {
    kept = arguments.target.to(loss_dtype(input));
    table.probabilities = kept.const_data_ptr<acc_t>();
    table.probability_stride = kept.stride(0);
  } else {
    table.target = arguments.target.const_data_ptr();
    table.index_type = index_type(arguments.target);
  }
  table.ignore_index = arguments.ignore_index;
  if (arguments.weight) table.weight = arguments.weight->const_data_ptr<acc_t>();
  table.label_smoothing = arguments.label_smoothing;
  table.z_loss = arguments.z_loss;
  table.softcap = arguments.softcap.value_or(0);
  return table;
}

inline bool is_plain(const CrossEntropyArguments& arguments) {
  return !arguments.has_probabilities() && arguments.label_smoothing == 0 && !arguments.softcap;
}

/// Calls launch.operator()<Team, kWork>(warps): a warp for each row, or a block.
template <typename Launch>
void for_rows(const at::Tensor& input, bool plain, const Launch& launch) {
  const int64_t rows = input.size(0);
  const bool is_short = input.size(1) <= kWarpClasses;
  if (is_short && plain) return launch.template operator()<WarpTeam, RowWork::kPlain>(rows);
  if (is_short) return launch.template operator()<WarpTeam, RowWork::kAny>(rows);
  const int64_t warps = rows * kWarpsPerBlock;
  if (plain) return launch.template operator()<BlockTeam, RowWork::kPlain>(warps);
  return launch.template operator()<BlockTeam, RowWork::kAny>(warps);
}

}  // namespace ampfuse
