// Runs the two kernels of multi_tensor_norm on fake tensors, as cuda/multi_tensor_norm_launch.cuh
// does on real ones.
#pragma once

#include "cuda/multi_tensor_norm.cuh"
#include "tensor_lists.h"

struct HostNorm {
  float total_norm = -1;
  std::vector<float> norms;
  float found_inf = -1;
  int64_t first_nonfinite = -2;
  int64_t nonfinite_count = -2;
};

// `launch(table, slots_before, partials, finished)` runs the first kernel.
template <ampfuse::math::NormType kNorm, typename T, typename Launch>
HostNorm run_norm_kernels(const std::vector<FakeTensor<T>>& tensors, int finish_grid,
                          Launch launch) {
  int64_t slots = 0;
  for (const auto& tensor : tensors) slots += tensor.size / ampfuse::math::kNormChunk + 1;
  std::vector<ampfuse::math::NormPartial> partials(slots);
  std::vector<ampfuse::math::NormPartial> norms(tensors.size());
  std::vector<ampfuse::NormRange> ranges(tensors.size());
  unsigned finished = 12345;  // the first kernel must clear it

  int64_t slots_before = 0;
  auto builder = ampfuse::build_tables<ampfuse::NormTable>([&](const ampfuse::NormTable& table) {
    launch(table, slots_before, partials.data(), &finished);
    slots_before += table.chunks();
  });
  for (size_t t = 0; t < tensors.size(); ++t) {
    builder.add({tensors[t].data(), &ranges[t]}, tensors[t].size);
  }
  builder.flush();

  HostNorm result;
  result.norms.resize(tensors.size());
  const ampfuse::NormWorkspace workspace = {partials.data(), ranges.data(), norms.data(),
                                            &finished};
  const ampfuse::NormResults<float> results = {
      &result.total_norm,       result.norms.data(),     &result.found_inf,
      /*clear_found_inf=*/true, &result.first_nonfinite, &result.nonfinite_count};
  simt::launch(ampfuse::multi_tensor_norm_finish_kernel<kNorm, float>, finish_grid,
               ampfuse::kThreads, 0, static_cast<int64_t>(tensors.size()), workspace, results);
  return result;
}

template <ampfuse::math::NormType kNorm, typename T>
HostNorm norm_on_host(const std::vector<FakeTensor<T>>& tensors, int grid = 1,
                      int finish_grid = 1) {
  return run_norm_kernels<kNorm>(tensors, finish_grid, [grid](const auto&... arguments) {
    simt::launch(ampfuse::multi_tensor_norm_kernel<kNorm, T>, grid, ampfuse::kThreads, 0,
                 arguments...);
  });
}
