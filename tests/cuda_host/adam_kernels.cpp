// The kernels of fused_adam, compiled for each kind of tensor.
#include "adam_on_host.h"

#include <optional>
#include <stdexcept>

namespace {

// Returns the grid of a device, limited to two blocks so that warps take more than one chunk.
int adam_grid(int64_t warps) {
  return std::min(2, ampfuse::grid_size(warps, 1));
}

template <typename Types>
int update_as(const FakeAdamTensors& tensors, const AdamOptions& options, int64_t first,
              HostPlan<typename Types::acc_t>& plan) {
  const auto constants = ampfuse::math::adam_constants<typename Types::acc_t>(options);
  int launches = 0;
  auto builder = ampfuse::build_tables<ampfuse::AdamTable>([&](const ampfuse::AdamTable& table) {
    simt::launch(ampfuse::fused_adam_kernel<Types>, adam_grid(table.chunks()), ampfuse::kThreads, 0,
                 table, first, plan.plan(), constants);
    first += table.count;
    ++launches;
  });
  for (const FakeAdamTensor& tensor : tensors) {
    std::array<void*, kAdamColumns> data = {};
    for (size_t c = 0; c < data.size(); ++c) {
      if (tensor.columns[c].size == tensor.size) data[c] = tensor.columns[c].data();
    }
    builder.add(data, tensor.size);
  }
  builder.flush();
  return launches;
}

}  // namespace

template <typename acc_t>
int prepare_on_host(const std::vector<float*>& counters, const AdamOptions& options,
                    const AdamSignals& signals, HostPlan<acc_t>& plan) {
  int launches = 0;
  int64_t first = 0;
  auto builder = ampfuse::build_tables<ampfuse::StepTable>([&](const ampfuse::StepTable& table) {
    const int grid = adam_grid((table.count + ampfuse::kWarp - 1) / ampfuse::kWarp);
    simt::launch(ampfuse::fused_adam_prepare_kernel<acc_t>, grid, ampfuse::kThreads, 0, table,
                 first, options, signals, plan.plan());
    first += table.count;
    ++launches;
  });
  for (float* const counter : counters) builder.add({counter}, 1);
  builder.flush();
  return launches;
}
template int prepare_on_host(const std::vector<float*>&, const AdamOptions&, const AdamSignals&,
                             HostPlan<float>&);

template <typename acc_t>
int update_on_host(const FakeAdamTensors& tensors, const AdamOptions& options, int64_t first,
                   HostPlan<acc_t>& plan) {
  if (tensors.empty()) return 0;
  std::optional<int> launches;
  const auto try_kind = [&]<AdamKind kKind>() {
    using Types = AdamTypesOf<kKind>;
    if constexpr (std::is_same_v<acc_t, typename Types::acc_t>) {
      if (tensors[0].kind == kKind) launches = update_as<Types>(tensors, options, first, plan);
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (try_kind.template operator()<kAdamKinds[i]>(), ...);
  }(std::make_index_sequence<kAdamKinds.size()>());
  if (!launches) throw std::invalid_argument("no kernel was compiled for these tensors");
  return *launches;
}
template int update_on_host(const FakeAdamTensors&, const AdamOptions&, int64_t, HostPlan<float>&);

int step_on_host(FakeAdamTensors& tensors, const AdamOptions& options, const AdamSignals& signals) {
  std::vector<float*> counters;
  for (FakeAdamTensor& tensor : tensors) counters.push_back(&tensor.steps_taken);
  const auto step_in = [&]<typename acc_t>(HostPlan<acc_t> plan) {
    const int launches = prepare_on_host(counters, options, signals, plan);
    return launches + update_on_host(tensors, options, 0, plan);
  };
  const bool is_double = !tensors.empty() && tensors[0].kind == kDoubles;
  return is_double ? step_in(HostPlan<double>(tensors.size()))
                   : step_in(HostPlan<float>(tensors.size()));
}
