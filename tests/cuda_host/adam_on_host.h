// Runs the two kernels of fused_adam on fake tensors, as cuda/fused_adam.cu does on real ones.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "cuda/fused_adam.cuh"
#include "tensor_lists.h"

// The distance from a 16-byte boundary to the start of each column, in elements.
using AdamOffsets = std::array<int64_t, ampfuse::math::kAdamColumns>;

// A parameter with its gradient and state. Columns that its types do not need are empty.
template <typename Types>
struct FakeAdamTensor {
  int64_t size;
  float steps_taken;
  FakeTensor<typename Types::param_t> param;
  FakeTensor<typename Types::grad_t> grad;
  FakeTensor<typename Types::state_t> exp_avg;
  FakeTensor<typename Types::state_t> exp_avg_sq;
  FakeTensor<typename Types::state_t> max_exp_avg_sq;
  FakeTensor<typename Types::master_t> master;

  static constexpr bool kHasMaster = Types::kMaster != ampfuse::Master::kNone;

  FakeAdamTensor(int64_t size, float steps_taken, const AdamOffsets& offsets)
      : size(size),
        steps_taken(steps_taken),
        param(size, offsets[ampfuse::math::kParam]),
        grad(size, offsets[ampfuse::math::kGrad]),
        exp_avg(size, offsets[ampfuse::math::kExpAvg]),
        exp_avg_sq(size, offsets[ampfuse::math::kExpAvgSq]),
        max_exp_avg_sq(Types::kAmsgrad ? size : 0, offsets[ampfuse::math::kMaxExpAvgSq]),
        master(kHasMaster ? size : 0, offsets[ampfuse::math::kMaster]) {}

  // Returns the number that is stepped; the parameter may be only a rounded copy of it.
  typename Types::acc_t number(int64_t i) const {
    if constexpr (Types::kMaster == ampfuse::Master::kRemainder) {
      return ampfuse::math::join_float({param.data()[i], master.data()[i]});
    } else if constexpr (Types::kMaster == ampfuse::Master::kFloat) {
      return master.data()[i];
    } else {
      return static_cast<typename Types::acc_t>(param.data()[i]);
    }
  }

  void set_number(int64_t i, typename Types::acc_t x) {
    if constexpr (Types::kMaster == ampfuse::Master::kRemainder) {
      const ampfuse::math::SplitFloat split = ampfuse::math::split_float(x);
      param.data()[i] = split.bfloat16;
      master.data()[i] = split.remainder;
    } else {
      param.data()[i] = static_cast<typename Types::param_t>(x);
      if constexpr (Types::kMaster == ampfuse::Master::kFloat) master.data()[i] = x;
    }
  }

  // Returns the bytes of everything that a launch may write.
  std::string bits() const {
    std::string bits;
    const auto append = [&bits](const auto* data, int64_t count) {
      bits.append(reinterpret_cast<const char*>(data), count * sizeof(*data));
    };
    append(&steps_taken, 1);
    append(param.data(), size);
    append(grad.data(), size);
    append(exp_avg.data(), size);
    append(exp_avg_sq.data(), size);
    append(max_exp_avg_sq.data(), max_exp_avg_sq.size);
    append(master.data(), master.size);
    return bits;
  }
};

template <typename Types>
using FakeAdamTensors = std::vector<FakeAdamTensor<Types>>;

template <typename Types>
std::string bits_of(const FakeAdamTensors<Types>& tensors) {
  std::string bits;
  for (const auto& tensor : tensors) bits += tensor.bits();
  return bits;
}

template <typename Types>
void fill_gradients(FakeAdamTensor<Types>& tensor, uint32_t seed) {
  const auto random = random_tensor<double>(tensor.size, 0, seed);
  for (int64_t i = 0; i < tensor.size; ++i) {
    tensor.grad.data()[i] = as_element<typename Types::grad_t>(random.data()[i]);
  }
}

// Returns a tensor as in the middle of training. Tensors with the same seed hold the same numbers,
// rounded to their types.
template <typename Types>
FakeAdamTensor<Types> random_adam_tensor(int64_t size, float steps_taken,
                                         const AdamOffsets& offsets, uint32_t seed) {
  using state_t = typename Types::state_t;
  FakeAdamTensor<Types> tensor(size, steps_taken, offsets);
  fill_gradients(tensor, seed);
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < size; ++i) {
    tensor.set_number(i, static_cast<typename Types::acc_t>(normal(generator)));
    tensor.exp_avg.data()[i] = as_element<state_t>(normal(generator));
    tensor.exp_avg_sq.data()[i] = as_element<state_t>(std::fabs(normal(generator)));
    // The maximum of v so far; the next v may exceed it.
    const double largest = std::fabs(normal(generator));
    if constexpr (Types::kAmsgrad) tensor.max_exp_avg_sq.data()[i] = as_element<state_t>(largest);
  }
  return tensor;
}

// Returns tensors with sizes on both sides of each unit of the kernel: a pack (1, 2 or 4 elements),
// a pack per lane (32, 64 or 128), a chunk (2048) and several chunks. Step counts differ between
// tensors.
template <typename Types>
FakeAdamTensors<Types> adam_boundary_tensors(const AdamOffsets& offsets = {}) {
  const int64_t sizes[] = {0,  1,  2,   3,   4,   5,    31,   32,   33,   63,
                           64, 65, 127, 128, 129, 2047, 2048, 2049, 8191, 8193};
  FakeAdamTensors<Types> tensors;
  uint32_t seed = 0;
  for (const int64_t size : sizes) {
    tensors.push_back(
        random_adam_tensor<Types>(size, static_cast<float>(seed * seed), offsets, seed));
    ++seed;
  }
  return tensors;
}

// The defaults of torch.optim.AdamW, except for weight_decay.
inline ampfuse::math::AdamOptions adamw_options() {
  return {.beta1 = 0.9,
          .beta2 = 0.999,
          .weight_decay = 0.1,
          .eps = 1e-8,
          .amsgrad = false,
          .maximize = false,
          .decoupled = true,
          .write_back_grads = false,
          .adopt_params = false};
}

// Signals of a step with a learning rate, but without skipping, unscaling or clipping.
inline ampfuse::AdamSignals signals_with(ampfuse::AdamScalar lr) {
  ampfuse::AdamSignals signals = {};
  signals.lr = lr;
  return signals;
}
inline ampfuse::AdamSignals signals_with_lr(double lr) {
  return signals_with({nullptr, true, lr});
}

// A plan whose fields are separate allocations; its numbers are NaN until a kernel writes them.
template <typename acc_t>
struct HostPlan {
  std::vector<ampfuse::math::AdamStep<acc_t>> steps;
  std::unique_ptr<acc_t> grad_factor = std::make_unique<acc_t>(nan());
  std::unique_ptr<bool> skip = std::make_unique<bool>();

  explicit HostPlan(size_t tensors) : steps(tensors, {nan(), nan(), nan()}) {}

  ampfuse::AdamPlan<acc_t> plan() { return {grad_factor.get(), skip.get(), steps.data()}; }
  static acc_t nan() { return std::numeric_limits<acc_t>::quiet_NaN(); }
};

// Returns the grid of a device, limited to two blocks so that warps take more than one chunk.
inline int adam_grid(int64_t warps) {
  return std::min(2, ampfuse::grid_size(warps, 1));
}

// prepare_on_host, update_on_host and step_on_host return their number of launches.

template <typename acc_t>
int prepare_on_host(const std::vector<float*>& counters, const ampfuse::math::AdamOptions& options,
                    const ampfuse::AdamSignals& signals, HostPlan<acc_t>& plan) {
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

template <typename Types>
int update_on_host(const FakeAdamTensors<Types>& tensors, const ampfuse::math::AdamOptions& options,
                   int64_t first, HostPlan<typename Types::acc_t>& plan) {
  const auto constants = ampfuse::math::adam_constants<typename Types::acc_t>(options);
  int launches = 0;
  auto builder = ampfuse::build_tables<ampfuse::AdamTable>([&](const ampfuse::AdamTable& table) {
    simt::launch(ampfuse::fused_adam_kernel<Types>, adam_grid(table.chunks()), ampfuse::kThreads, 0,
                 table, first, plan.plan(), constants);
    first += table.count;
    ++launches;
  });
  for (const auto& tensor : tensors) {
    builder.add({tensor.param.data(), tensor.grad.data(), tensor.exp_avg.data(),
                 tensor.exp_avg_sq.data(), Types::kAmsgrad ? tensor.max_exp_avg_sq.data() : nullptr,
                 FakeAdamTensor<Types>::kHasMaster ? tensor.master.data() : nullptr},
                tensor.size);
  }
  builder.flush();
  return launches;
}

template <typename Types>
std::vector<float*> counters_of(FakeAdamTensors<Types>& tensors) {
  std::vector<float*> counters;
  for (auto& tensor : tensors) counters.push_back(&tensor.steps_taken);
  return counters;
}

template <typename Types>
int step_on_host(FakeAdamTensors<Types>& tensors, const ampfuse::math::AdamOptions& options,
                 const ampfuse::AdamSignals& signals) {
  HostPlan<typename Types::acc_t> plan(tensors.size());
  const int launches = prepare_on_host(counters_of(tensors), options, signals, plan);
  return launches + update_on_host(tensors, options, 0, plan);
}
