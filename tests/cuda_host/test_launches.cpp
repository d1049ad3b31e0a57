// The launches of multi-tensor ops, optimizers and update_scale. They group tensors by dtype, fill
// tables, lay out scratch memory and choose kernels. Other tests run the kernels alone.
#include "step_on_host.h"

#include "cuda/fused_step_interface.h"
#include "cuda/multi_tensor_interface.h"
#include "cuda/update_scale_interface.h"

#include <complex>
#include <map>
#include <utility>

#include "catch.h"
#include "device/cuda_runtime.h"
#include "fake_caller.h"

using ampfuse::StepDtypes;
using ampfuse::StepTensor;
using ampfuse::TensorRun;
using ampfuse::math::NormType;
using c10::ScalarType;

namespace {

// Tensors of all real types in turn, some without elements, some longer than a chunk.
std::vector<Numbers> mixed_tensors() {
  std::vector<Numbers> tensors;
  uint32_t seed = 0;
  for (const int64_t size : {5, 0, 8192, 8193, 33, 1, 20000, 7}) {
    for (const Type type : {kHalf, kDouble, kFloat, kBFloat16}) {
      const Numbers& tensor = tensors.emplace_back(type, size, seed % 3);
      tensor.fill(random_values(size, seed++));
    }
  }
  return tensors;
}

std::vector<TensorRun> runs_of(const std::vector<Numbers>& tensors) {
  std::vector<TensorRun> runs;
  for (const Numbers& tensor : tensors)
    runs.push_back({tensor.data(), tensor.size, dtype_of(tensor.type)});
  return runs;
}

// Magnitudes of the elements of all tensors.
using Magnitudes = std::vector<std::vector<double>>;

Magnitudes magnitudes_of(const std::vector<Numbers>& tensors) {
  Magnitudes magnitudes;
  for (const Numbers& tensor : tensors) {
    auto& of_tensor = magnitudes.emplace_back();
    for (int64_t i = 0; i < tensor.size; ++i) of_tensor.push_back(std::fabs(tensor[i]));
  }
  return magnitudes;
}

double norm_of(NormType type, const std::vector<double>& magnitudes) {
  long double sum = 0;
  for (const long double x : magnitudes)
    sum = type == NormType::kInf ? std::max(sum, x) : sum + (type == NormType::kL1 ? x : x * x);
  return static_cast<double>(type == NormType::kL2 ? std::sqrt(sum) : sum);
}

// The outputs of a norm of `tensors` tensors, in allocations without spare room.
struct NormOutputs {
  Numbers norms;
  Numbers total_norm;
  std::vector<float> found_inf = {0};
  std::vector<int64_t> counts = {7, 7};

  NormOutputs(Type type, size_t tensors)
      : norms(type, static_cast<int64_t>(tensors)), total_norm(type, 1) {}

  ampfuse::NormPointers pointers(bool clear_found_inf) {
    return {total_norm.data(), norms.data(),    norms.type == kDouble,
            found_inf.data(),  clear_found_inf, &counts[0],
            &counts[1]};
  }

  void check(NormType type, const Magnitudes& magnitudes) const {
    std::vector<double> all;
    for (size_t t = 0; t < magnitudes.size(); ++t) {
      const double expected = norm_of(type, magnitudes[t]);
      CAPTURE(type, t);
      CHECK(std::fabs(norms[t] - expected) <= 1e-6 * expected);
      all.insert(all.end(), magnitudes[t].begin(), magnitudes[t].end());
    }
    CHECK(std::fabs(total_norm[0] - norm_of(type, all)) <= 1e-6 * norm_of(type, all));
    CHECK(counts == std::vector<int64_t>{-1, 0});
  }
};

constexpr NormType kNormTypes[] = {NormType::kL1, NormType::kL2, NormType::kInf};

}  // namespace

TEST_CASE("norms of a list of all real types are those of its tensors") {
  const std::vector<Numbers> tensors = mixed_tensors();
  for (const NormType type : kNormTypes) {
    for (const Type out : {kFloat, kDouble}) {
      FakeCaller caller;
      NormOutputs outputs(out, tensors.size());
      outputs.found_inf = {1};
      launch_multi_tensor_norm(caller, runs_of(tensors), type, outputs.pointers(true));
      outputs.check(type, magnitudes_of(tensors));
      CHECK(outputs.found_inf[0] == 0);
    }
  }
}

TEST_CASE("norms of complex tensors are those of magnitudes") {
  std::vector<std::complex<float>> floats(300, {3, -4});
  std::vector<std::complex<double>> doubles(9000, {5, 12});
  const std::vector<TensorRun> runs = {{floats.data(), 300, ScalarType::ComplexFloat},
                                       {doubles.data(), 9000, ScalarType::ComplexDouble}};
  for (const NormType type : {NormType::kL1, NormType::kInf}) {  // L2 reads pairs of real numbers
    FakeCaller caller;
    NormOutputs outputs(kDouble, runs.size());
    launch_multi_tensor_norm(caller, runs, type, outputs.pointers(true));
    outputs.check(type, {std::vector<double>(300, 5), std::vector<double>(9000, 13)});
  }
}

TEST_CASE("lists longer than a table are processed in several launches") {
  std::vector<Numbers> tensors;
  Magnitudes magnitudes;
  for (int t = 0; t < 3000; ++t) {
    tensors.emplace_back(kFloat, 1).set(0, t % 10);
    magnitudes.push_back({static_cast<double>(t % 10)});
  }
  FakeCaller caller;
  NormOutputs outputs(kFloat, tensors.size());
  launch_multi_tensor_norm(caller, runs_of(tensors), NormType::kL2, outputs.pointers(true));
  outputs.check(NormType::kL2, magnitudes);
}

TEST_CASE("unscaling halves all tensors, with and without norms") {
  const float half = 0.5;
  for (const NormType type : kNormTypes) {
    const std::vector<Numbers> tensors = mixed_tensors();
    Magnitudes halved = magnitudes_of(tensors);
    for (auto& of_tensor : halved) {
      for (double& x : of_tensor) x /= 2;
    }
    FakeCaller caller;
    NormOutputs outputs(kDouble, tensors.size());
    launch_multi_tensor_unscale_norm(caller, runs_of(tensors), type, &half,
                                     outputs.pointers(false));
    outputs.check(type, halved);
    CHECK(magnitudes_of(tensors) == halved);
    launch_multi_tensor_unscale(caller, runs_of(tensors), &half, outputs.found_inf.data());
    CHECK(tensors[0][0] == mixed_tensors()[0][0] / 4);
    CHECK(outputs.found_inf[0] == 0);
    tensors[2].set(4, HUGE_VAL);
    launch_multi_tensor_unscale(caller, runs_of(tensors), &half, outputs.found_inf.data());
    CHECK(outputs.found_inf[0] == 1);
  }
}

TEST_CASE("clipping multiplies all tensors by the norm of either type") {
  for (const Type type : {kFloat, kDouble}) {
    const std::vector<Numbers> tensors = mixed_tensors();
    const Numbers norm(type, 1);
    norm.set(0, 4 - 1e-6);  // the coefficient is 1 / (norm + 1e-6)
    FakeCaller caller;
    launch_multi_tensor_clip(caller, runs_of(tensors), norm.data(), type == kDouble, 1.0);
    const std::vector<Numbers> before = mixed_tensors();
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (int64_t i = 0; i < tensors[t].size; ++i) {
        const double expected = before[t][i] / 4;
        const double allowed = 0x1p-8 * std::fabs(expected) + 0x1p-24;  // rounds to 16 bits
        if (!(std::fabs(tensors[t][i] - expected) <= allowed)) FAIL(t << ' ' << i);
      }
    }
  }
}

namespace {

StepDtypes dtypes_of(const StepKind& kind) {
  const auto master = [&] {
    if (kind.master == Master::kNone) return ampfuse::kNoDtype;
    return kind.master == Master::kFloat ? ScalarType::Float : ScalarType::Short;
  };
  const auto ema = [&] {
    if (kind.ema == NumberType::kNone) return ampfuse::kNoDtype;
    return kind.ema == NumberType::kBFloat16 ? ScalarType::BFloat16
                                             : dtype_of(arithmetic_of(kind.param));
  };
  return {dtype_of(kind.param), dtype_of(kind.grad), dtype_of(kind.state), master(), ema()};
}

StepTensor as_step_tensor(FakeStepTensor& tensor) {
  StepTensor step = {{},
                     tensor.size,
                     dtypes_of(tensor.kind),
                     tensor.steps_taken < 0 ? nullptr : &tensor.steps_taken,
                     tensor.first_index};
  for (size_t c = 0; c < step.data.size(); ++c) {
    if (tensor.columns[c].size > 0) step.data[c] = tensor.columns[c].data();
  }
  return step;
}

// Checks that one launch for tensors of several kinds in turn gives the bits of launches for each.
template <typename Rule, size_t kinds>
void check_steps(const std::array<StepKind, kinds>& all, HostOptions<Rule> options) {
  std::map<std::pair<int, bool>, std::vector<StepKind>> calls;  // these are the same in a call
  for (const StepKind& kind : all) calls[{kind.moments, kind.rounds_at_random}].push_back(kind);
  for (const auto& [shared, of_call] : calls) {
    const auto [moments, rounds] = shared;
    options.step.round_at_random = rounds;
    options.step.seed = 5;
    options.step.ema_weight = 0.25;
    std::vector<FakeStepTensors> expected;
    std::vector<FakeStepTensors> actual;
    for (const StepKind& kind : of_call) {
      expected.push_back(step_boundary_tensors(kind));
      step_on_host(expected.back(), options, signals_with_lr(0.01));
      actual.push_back(step_boundary_tensors(kind));
    }
    std::vector<StepTensor> tensors;
    for (size_t t = 0; t < actual[0].size(); ++t) {
      for (FakeStepTensors& of_kind : actual) tensors.push_back(as_step_tensor(of_kind[t]));
    }
    FakeCaller caller;
    launch_fused_step(caller, ampfuse::StepCall<Rule>{tensors, options, moments, options.step,
                                                      signals_with_lr(0.01)});
    for (size_t kind = 0; kind < of_call.size(); ++kind) {
      CAPTURE(moments, rounds, kind);
      CHECK(bits_of(actual[kind]) == bits_of(expected[kind]));
    }
  }
}

}  // namespace

TEST_CASE("one step of tensors of many kinds gives the bits of a step of each kind") {
  check_steps<AdamRule>(kKindsOf<AdamRule>, adamw_options());
  check_steps<SgdRule>(kKindsOf<SgdRule>, {{0.9, 0, 0.1, false}, {}});
}

TEST_CASE("a flag on the device lowers the scale") {
  const float raised = 1;
  const float clear = 0;
  std::vector<float> scale = {8};
  std::vector<int32_t> growth_tracker = {5};
  std::vector<int64_t> counters = {1, 0, 0};
  FakeCaller caller;
  launch_update_scale(
      caller, {{&clear, &raised}, 2},
      {2, 0.5, 3, -INFINITY, INFINITY, 1, ampfuse::math::HysteresisRefill::kGrowth, true, 6},
      {scale.data(), growth_tracker.data(), counters.data(), nullptr, 0, nullptr, nullptr});
  CHECK(scale[0] == 4);
  CHECK(counters == std::vector<int64_t>{1, 1, 1});
}

TEST_CASE("an error of CUDA is thrown by the caller, once") {
  const std::vector<Numbers> tensors = mixed_tensors();
  const float half = 0.5;
  float found_inf = 0;
  FakeCaller caller;
  simt::next_error = 35;
  CHECK_THROWS_WITH(launch_multi_tensor_unscale(caller, runs_of(tensors), &half, &found_inf),
                    "35: an error of the device");
  launch_multi_tensor_unscale(caller, runs_of(tensors), &half, &found_inf);
}
