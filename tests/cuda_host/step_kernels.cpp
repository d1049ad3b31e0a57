// The kernels of the fused optimizers, compiled for each kind of tensor.
#include "step_on_host.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace {

// Returns the grid of a device, limited to two blocks so that warps take more than one chunk.
int step_grid(int64_t warps) {
  return std::min(2, ampfuse::grid_size(warps, 1));
}

template <typename Types, typename Rule>
int update_as(const FakeStepTensors& tensors, const HostOptions<Rule>& options, int64_t first,
              HostPlan<Rule, typename Types::acc_t>& plan) {
  using Table = ampfuse::StepTable<Rule>;
  const typename Rule::template Constants<typename Types::acc_t> constants(options);
  const StepKind& kind = tensors[0].kind;
  const ampfuse::ExtendedTypes types = {number_type(kind.grad), kind.ema};
  int launches = 0;
  auto builder = ampfuse::build_tables<Table>(
      [&](const Table& table) {
        simt::launch(ampfuse::fused_step_kernel<Types>, step_grid(table.chunks()),
                     ampfuse::kThreads, 0, table, first, plan.plan(), options.step, types,
                     constants);
        first += table.count;
        ++launches;
      },
      kind.is_extended() ? kMostColumns : Table::kColumns);
  for (const FakeStepTensor& tensor : tensors) {
    std::array<void*, kMostColumns> data = {};
    for (size_t c = 0; c < data.size(); ++c) {
      if (tensor.columns[c].size > 0 || tensor.size == 0) data[c] = tensor.columns[c].data();
    }
    builder.add_columns(data.data(), tensor.size);
  }
  builder.flush();
  return launches;
}

}  // namespace

template <typename Rule, typename acc_t>
int prepare_on_host(const std::vector<HostCounter>& counters, const HostOptions<Rule>& options,
                    const StepSignals& signals, HostPlan<Rule, acc_t>& plan) {
  using ampfuse::CounterTable;
  int launches = 0;
  int64_t first = 0;
  auto builder = ampfuse::build_tables<CounterTable>([&](const CounterTable& table) {
    const int grid = step_grid((table.count + ampfuse::kWarp - 1) / ampfuse::kWarp);
    const typename Rule::Options& of_rule = options;
    simt::launch(ampfuse::fused_step_prepare_kernel<Rule, acc_t>, grid, ampfuse::kThreads, 0, table,
                 first, of_rule, signals, plan.plan());
    first += table.count;
    ++launches;
  });
  for (const HostCounter& counter : counters) {
    builder.add({counter.count, reinterpret_cast<void*>(counter.first_index)}, 1);
  }
  builder.flush();
  return launches;
}
template int prepare_on_host(const std::vector<HostCounter>&, const AdamStepOptions&,
                             const StepSignals&, HostPlan<AdamRule, float>&);

template <typename Rule, typename acc_t>
int update_on_host(const FakeStepTensors& tensors, const HostOptions<Rule>& options, int64_t first,
                   HostPlan<Rule, acc_t>& plan) {
  if (tensors.empty()) return 0;
  std::optional<int> launches;
  const auto try_kind = [&]<StepKind kKind>() {
    using Types = StepTypesOf<Rule, kKind>;
    if constexpr (std::is_same_v<acc_t, typename Types::acc_t>) {
      if (!launches && tensors[0].kind == kKind)
        launches = update_as<Types>(tensors, options, first, plan);
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (try_kind.template operator()<kKindsOf<Rule>[i]>(), ...);
  }(std::make_index_sequence<kKindsOf<Rule>.size()>());
  if (!launches) throw std::invalid_argument("no kernel was compiled for these tensors");
  return *launches;
}
template int update_on_host(const FakeStepTensors&, const AdamStepOptions&, int64_t,
                            HostPlan<AdamRule, float>&);

template <typename Rule>
int step_on_host(FakeStepTensors& tensors, const HostOptions<Rule>& options,
                 const StepSignals& signals) {
  std::vector<HostCounter> counters;
  for (FakeStepTensor& tensor : tensors) {
    counters.push_back(
        {tensor.steps_taken < 0 ? nullptr : &tensor.steps_taken, tensor.first_index});
  }
  const auto step_in = [&]<typename acc_t>(HostPlan<Rule, acc_t> plan) {
    const int launches = prepare_on_host(counters, options, signals, plan);
    return launches + update_on_host(tensors, options, 0, plan);
  };
  const bool is_double = !tensors.empty() && tensors[0].kind.param == kDouble;
  return is_double ? step_in(HostPlan<Rule, double>(tensors.size()))
                   : step_in(HostPlan<Rule, float>(tensors.size()));
}
template int step_on_host(FakeStepTensors&, const AdamStepOptions&, const StepSignals&);
template int step_on_host(FakeStepTensors&, const SgdStepOptions&, const StepSignals&);
