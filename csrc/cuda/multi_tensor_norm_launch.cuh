// The host code that multi_tensor_norm and multi_tensor_unscale_norm share: scratch memory, tables,
// and the launch of the finish kernel.
#pragma once

#include <vector>

#include "dispatch.cuh"
#include "multi_tensor_interface.h"
#include "multi_tensor_norm.cuh"
#include "stream.cuh"

namespace ampfuse {

/// Calls run.operator()<kNorm>().
template <typename Run>
void dispatch_norm_type(math::NormType type, const Run& run) {
  switch (type) {
    case math::NormType::kL1:
      return run.template operator()<math::NormType::kL1>();
    case math::NormType::kL2:
      return run.template operator()<math::NormType::kL2>();
    case math::NormType::kInf:
      return run.template operator()<math::NormType::kInf>();
  }
}

/// The scratch memory of one call.
struct NormScratch {
  NormScratch(CudaCaller& caller, const std::vector<TensorRun>& runs) {
    int64_t slots = 0;
    for (const TensorRun& run : runs) slots += run.size / math::kNormChunk + 1;
    const size_t tensors = runs.size();
    void* const memory = caller.allocate((slots + tensors) * sizeof(math::NormPartial) +
                                         tensors * sizeof(NormRange) + sizeof(unsigned));
    partials = static_cast<math::NormPartial*>(memory);
    norms = partials + slots;
    ranges = reinterpret_cast<NormRange*>(norms + tensors);
    finished = reinterpret_cast<unsigned*>(ranges + tensors);
  }

  math::NormPartial* partials;
  math::NormPartial* norms;  // one per tensor
  NormRange* ranges;
  unsigned* finished;
};

/// Calls launch.operator()<scalar_t>(table, slots_before) for each table of each dtype.
template <math::NormType kNorm, typename Launch>
void for_each_norm_table(const std::vector<TensorRun>& runs, const NormScratch& scratch,
                         const Launch& launch) {
  int64_t slots = 0;
  for (const DtypeGroup& group : dtype_groups(runs)) {
    const auto launch_group = [&]<typename scalar_t>() {
      auto builder = build_tables<NormTable>([&](const NormTable& table) {
        launch.template operator()<scalar_t>(table, slots);
        slots += table.chunks();
      });
      for (size_t i = 0; i < group.runs.size(); ++i) {
        builder.add({group.runs[i].data, scratch.ranges + group.indices[i]}, group.runs[i].size);
      }
      builder.flush();
    };
    if constexpr (kNorm == math::NormType::kL2) {
      dispatch_real(group.dtype, launch_group);  // complex_as() made complex tensors real
    } else {
      dispatch_any(group.dtype, launch_group);
    }
  }
}

/// Launches the finish kernel, which computes the outputs of `tensors` tensors from the partials.
template <math::NormType kNorm>
void launch_norm_finish(const LaunchStream& stream, const NormScratch& scratch,
                        const NormPointers& outputs, int64_t tensors) {
  const NormWorkspace workspace = {scratch.partials, scratch.ranges, scratch.norms,
                                   scratch.finished};
  const auto launch = [&]<typename out_t>() {
    const NormResults<out_t> results = {static_cast<out_t*>(outputs.total_norm),
                                        static_cast<out_t*>(outputs.norms),
                                        outputs.found_inf,
                                        outputs.clear_found_inf,
                                        outputs.first_nonfinite,
                                        outputs.nonfinite_count};
    // One block per tensor.
    stream.launch(multi_tensor_norm_finish_kernel<kNorm, out_t>, tensors * kWarpsPerBlock, tensors,
                  workspace, results);
  };
  outputs.are_doubles ? launch.template operator()<double>() : launch.template operator()<float>();
}

}  // namespace ampfuse
