#include "cross_entropy_shards.cuh"

#include "cross_entropy_launch.cuh"

namespace ampfuse {

namespace {

// Calls run.operator()<scalar_t>(). The logits of a shard are float or double.
template <typename Run>
void dispatch_shard(c10::ScalarType dtype, const Run& run) {
  if (dtype == c10::ScalarType::Double) return run.template operator()<double>();
  run.template operator()<float>();
}

}  // namespace

void launch_cross_entropy_shards_reduce(CudaCaller& caller, const LogitRows& rows,
                                        math::ShardPartial* partials, int64_t* argmax) {
  const LaunchStream stream(caller);
  dispatch_shard(rows.dtype, [&]<typename scalar_t>() {
    const auto table = table_of<scalar_t>(rows);
    const auto launch = [&]<typename Team, RowWork kWork>() {
      const int blocks =
          resident_blocks<scalar_t, Team, kWork>(stream.multiprocessors(), table.rows);
      stream.launch(cross_entropy_shards_reduce_kernel<scalar_t, Team, kWork>,
                    LaunchShape{blocks, Team::kBlock}, table, partials, argmax);
    };
    for_rows_not_kept(table.classes * int64_t{sizeof(scalar_t)},
                      is_plain(rows) && argmax == nullptr, launch);
  });
}

void launch_cross_entropy_shards_join(CudaCaller& caller, const LogitRows& rows,
                                      const JoinPointers& pointers) {
  const LaunchStream stream(caller);
  dispatch_shard(rows.dtype, [&]<typename scalar_t>() {
    using acc_t = RowAcc<scalar_t>;
    const auto table = table_of<scalar_t>(rows);
    const JoinedResults<acc_t> results = {.loss = pointers.loss,
                                          .statistics = pointers.statistics,
                                          .lse = static_cast<acc_t*>(pointers.lse),
                                          .entropy = static_cast<acc_t*>(pointers.entropy),
                                          .argmax = pointers.argmax};
    stream.launch(cross_entropy_shards_join_kernel<scalar_t>, (table.rows + kWarp - 1) / kWarp,
                  table, pointers.partials, pointers.shards, pointers.all_classes, results);
  });
}

}  // namespace ampfuse
