// From a call's arguments to its kernels' and to the teams that take its rows.
#pragma once

#include <algorithm>
#include <limits>

#include "../ops/cross_entropy.h"
#include "cross_entropy.cuh"
#include "stream.h"

namespace ampfuse {

/// Rows up to this many bytes are a warp's, up to this many classes those of a few lanes.
inline constexpr int64_t kWarpBytes = 4096;
inline constexpr int64_t kFewClasses = 128;
inline constexpr int kFewLanes = 8;

/// Threads count classes in ints, and a few teams' packs further.
inline constexpr int64_t kMostClasses = std::numeric_limits<int>::max() - (1 << 17);

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
  check_cross_entropy_memory(arguments);
  const at::Tensor& input = arguments.input;
  TORCH_CHECK_VALUE(input.size(1) <= kMostClasses, "cross_entropy: input: expected at most ",
                    kMostClasses, " classes, got ", input.size(1));
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
  table.of_target = static_cast<acc_t>(1 - arguments.label_smoothing);
  table.uniform = static_cast<acc_t>(arguments.label_smoothing / std::max(1, table.classes));
  table.z_loss = static_cast<RowNumber<scalar_t>>(arguments.z_loss);
  table.softcap = static_cast<acc_t>(arguments.softcap.value_or(0));
  return table;
}

inline bool is_plain(const CrossEntropyArguments& arguments) {
  return !arguments.has_probabilities() && arguments.label_smoothing == 0 && !arguments.softcap;
}

/// What a device has room for.
struct DeviceRoom {
  int64_t multiprocessors;
  int64_t shared;            // bytes, of a multiprocessor
  int64_t shared_per_block;  // that one block may have of them
  int64_t l2;

  explicit DeviceRoom(const LaunchStream& stream)
      : multiprocessors(stream.multiprocessors()),
        shared(stream.attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)),
        shared_per_block(stream.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
        l2(stream.attribute(cudaDevAttrL2CacheSize)) {}

  /// Bytes of shared memory for each of so many blocks on a multiprocessor. The system takes 1 KiB
  /// of each, and kernels have a few hundred bytes of their own.
  int64_t of_block(int blocks) const {
    return std::min(shared_per_block, shared / blocks - 1024) - 512;
  }

  /// Whether the L2 cache has room for what rows of this size that are on their way, so many on
  /// each multiprocessor, have beside shared memory. It holds other things, too.
  bool l2_holds(int64_t row_bytes, int rows) const {
    return multiprocessors * rows * (row_bytes - of_block(rows)) <= l2 / 4 * 3;
  }
};

/// How forward's kernel is launched.
struct RowLaunch {
  int blocks;
  int kept;    // packs of each row, a multiple of a team's size
  int shared;  // bytes
};

template <typename scalar_t, typename Team, RowWork kWork>
RowLaunch row_launch(const DeviceRoom& room, int64_t rows, int64_t classes, bool with_grad) {
  constexpr int kBlocks = kRowBlocks<kWork, scalar_t, Team>;
  constexpr int64_t kPiece = Team::kSize * int64_t(sizeof(Pack<scalar_t>));
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  const int64_t needed = (row_bytes + kPiece - 1) / kPiece;
  const int64_t pieces = std::min(needed, room.of_block(kBlocks) / Team::kTeams / kPiece);
  const int64_t wanted = (rows + Team::kTeams - 1) / Team::kTeams;
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, room.multiprocessors * kBlocks);
  if (!with_grad) return {static_cast<int>(blocks), 0, 0};
  return {static_cast<int>(blocks), static_cast<int>(pieces * Team::kSize),
          static_cast<int>(pieces * kPiece * Team::kTeams)};
}

/// Calls launch.operator()<Team, kWork>(): a few lanes for each row, a warp, or a block, the
/// smallest one for which what it cannot keep of its rows stays in the L2 cache.
template <typename scalar_t, typename Launch>
void for_forward_rows(const DeviceRoom& room, int64_t classes, bool plain, const Launch& launch) {
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  if (!plain && row_bytes <= kWarpBytes)
    return launch.template operator()<WarpTeam, RowWork::kAny>();
  if (!plain) return launch.template operator()<BlockTeam<kThreads>, RowWork::kAny>();
  if constexpr (!std::is_same_v<scalar_t, double>) {
    if (classes <= kFewClasses) {
      return launch.template operator()<LaneTeam<kFewLanes>, RowWork::kPlain>();
    }
    if (row_bytes > room.of_block(BlockTeam<kThreads>::kBlocks)) {
      using Half = BlockTeam<2 * kThreads>;
      using Whole = BlockTeam<4 * kThreads>;
      return room.l2_holds(row_bytes, Half::kBlocks)
                 ? launch.template operator()<Half, RowWork::kPlain>()
                 : launch.template operator()<Whole, RowWork::kPlain>();
    }
  }
  if (row_bytes <= kWarpBytes) return launch.template operator()<WarpTeam, RowWork::kPlain>();
  return launch.template operator()<BlockTeam<kThreads>, RowWork::kPlain>();
}

/// The same where rows are gone through once.
template <typename Launch>
void for_backward_rows(const at::Tensor& input, bool plain, const Launch& launch) {
  const bool is_short = input.size(1) * input.itemsize() <= kWarpBytes;
  if (is_short && plain) return launch.template operator()<WarpTeam, RowWork::kPlain>();
  if (is_short) return launch.template operator()<WarpTeam, RowWork::kAny>();
  if (plain) return launch.template operator()<BlockTeam<kThreads>, RowWork::kPlain>();
  return launch.template operator()<BlockTeam<kThreads>, RowWork::kAny>();
}

/// CrossEntropyKernels' backward and rescale.
void cross_entropy_backward_cuda(const CrossEntropyArguments& arguments,
                                 const at::Tensor& grad_output, const at::Tensor& statistics,
                                 const at::Tensor& divisor, const at::Tensor& grad);
void cross_entropy_rescale_cuda(const at::Tensor& grad, const at::Tensor& baked,
                                const at::Tensor& grad_output);

}  // namespace ampfuse
