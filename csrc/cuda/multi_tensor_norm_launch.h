// The host code that multi_tensor_norm and multi_tensor_unscale_norm share: scratch memory, tables,
// and the launch of the finish kernel.
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "../ops/multi_tensor_norm.h"
#include "dispatch.h"
#include "multi_tensor_norm.cuh"
#include "stream.h"

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

/// The scratch memory of one call. It may be freed before the kernels finish: the caching allocator
/// reuses it only on the same stream.
class NormScratch {
 public:
  explicit NormScratch(const std::vector<TensorRun>& runs, c10::Device device) {
    int64_t partials = 0;
    for (const TensorRun& run : runs) partials += run.size / math::kNormChunk + 1;
    const auto tensors = static_cast<int64_t>(runs.size());
    bytes_ = at::empty({(partials + tensors) * int64_t(sizeof(math::NormPartial)) +
                        tensors * int64_t(sizeof(NormRange)) + int64_t(sizeof(unsigned))},
                       at::TensorOptions().device(device).dtype(at::kByte));
    this->partials = reinterpret_cast<math::NormPartial*>(bytes_.mutable_data_ptr());
    norms = this->partials + partials;
    ranges = reinterpret_cast<NormRange*>(norms + tensors);
    finished = reinterpret_cast<unsigned*>(ranges + tensors);
  }

  math::NormPartial* partials;
  math::NormPartial* norms;  // one per tensor
  NormRange* ranges;
  unsigned* finished;

 private:
  at::Tensor bytes_;
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

/// Launches the finish kernel, which computes the outputs from the partials and writes the flag to
/// `found_inf`.
template <math::NormType kNorm>
void launch_norm_finish(const LaunchStream& stream, const NormScratch& scratch,
                        const NormOutputs& outputs, const at::Tensor& found_inf,
                        bool clear_found_inf) {
  const auto& [total_norm, norms, unused, first_nonfinite, nonfinite_count] = outputs;
  const NormWorkspace workspace = {scratch.partials, scratch.ranges, scratch.norms,
                                   scratch.finished};
  const auto launch = [&]<typename out_t>() {
    const NormResults<out_t> results = {
        total_norm.template mutable_data_ptr<out_t>(), norms.template mutable_data_ptr<out_t>(),
        found_inf.mutable_data_ptr<float>(),           clear_found_inf,
        first_nonfinite.mutable_data_ptr<int64_t>(),   nonfinite_count.mutable_data_ptr<int64_t>()};
    // One block per tensor.
    stream.launch(multi_tensor_norm_finish_kernel<kNorm, out_t>, norms.numel() * kWarpsPerBlock,
                  norms.numel(), workspace, results);
  };
  total_norm.scalar_type() == at::kDouble ? launch.template operator()<double>()
                                          : launch.template operator()<float>();
}

}  // namespace ampfuse
