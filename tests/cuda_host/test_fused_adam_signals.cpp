// Signals that only the device knows when a step begins. Extreme options are tested in Python,
// since the arithmetic is that of the CPU.
#include <algorithm>
#include <cstring>

#include "catch.h"
#include "step_on_host.h"

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Returns tensors with few elements, but with more than a pack per lane and a tail.
FakeStepTensors small_tensors(const StepKind& kind = kFloats, float steps_taken = 3) {
  FakeStepTensors tensors;
  uint32_t seed = 0;
  for (const int64_t size : {0, 1, 131}) {
    tensors.push_back(random_step_tensor(kind, size, steps_taken, {}, seed++));
  }
  return tensors;
}

// Returns small tensors with their gradients multiplied by `factor`.
FakeStepTensors with_gradients_times(double factor) {
  FakeStepTensors tensors = small_tensors();
  for (const FakeStepTensor& tensor : tensors) tensor[kGrad].multiply(factor);
  return tensors;
}

std::string bits_after(FakeStepTensors tensors, const AdamStepOptions& options,
                       const StepSignals& signals) {
  step_on_host(tensors, options, signals);
  return bits_of(tensors);
}

AdamStepOptions writing_back() {
  AdamStepOptions options = adamw_options();
  options.step.write_back_grads = true;
  return options;
}

// Signals that clip an unscaled norm of 8 to 2; total_norm is the norm of gradients scaled by 16.
struct Clipping {
  float grad_scale = 16;
  float total_norm = 8 * 16;
  float grad_norm = -1;

  StepSignals signals() {
    StepSignals signals = signals_with_lr(0.01);
    signals.grad_scale = &grad_scale;
    signals.total_norm = {&total_norm, false, 0};
    signals.clip = true;
    signals.max_norm = 2;
    signals.grad_norm = &grad_norm;
    return signals;
  }
};
const auto kClipFactor = static_cast<float>(2.0 / (8.0 + 1e-6) / 16);

}  // namespace

TEST_CASE("any found_inf except 0 skips the step but grad_norm is still reported") {
  const std::string before = bits_of(small_tensors(kHalfWithMaster));
  for (const float found_inf : {1.0f, 2.0f, 3.0f, -1.0f, kNan}) {
    simt::for_each_schedule([&] {
      Clipping clipping;
      StepSignals signals = clipping.signals();
      signals.found_inf = &found_inf;
      CHECK((bits_after(small_tensors(kHalfWithMaster), writing_back(), signals) == before));
      CHECK(clipping.grad_norm == 8);
    });
  }
}

TEST_CASE("a step is skipped when the inverse of the loss scale is not a finite float") {
  const std::string before = bits_of(small_tensors(kHalfWithMaster));
  StepSignals signals = signals_with_lr(0.01);
  for (const float scale : {0.0f, 0x1p-149f, 0x1p-128f, kNan}) {
    signals.grad_scale = &scale;
    simt::for_each_schedule([&] {
      CHECK((bits_after(small_tensors(kHalfWithMaster), adamw_options(), signals) == before));
    });
  }
  const float smallest = std::nextafter(0x1p-128f, 1.0f);  // with a finite inverse
  signals.grad_scale = &smallest;
  FakeStepTensors tensors = small_tensors();
  step_on_host(tensors, adamw_options(), signals);
  CHECK(tensors[2].steps_taken == 4);
  CHECK(std::isfinite(tensors[2][kParam][0]));
}

TEST_CASE("the step after a skipped first step counts as the first") {
  simt::for_each_schedule([] {
    FakeStepTensors tensors = small_tensors(kFloats, /*steps_taken=*/0);
    float found_inf = 1;
    StepSignals signals = signals_with_lr(0.01);
    signals.found_inf = &found_inf;
    step_on_host(tensors, adamw_options(), signals);
    CHECK(tensors[0].steps_taken == 0);
    found_inf = 0;
    step_on_host(tensors, adamw_options(), signals);
    CHECK(tensors[0].steps_taken == 1);  // this tensor has no elements
    CHECK((bits_of(tensors) ==
           bits_after(small_tensors(kFloats, 0), adamw_options(), signals_with_lr(0.01))));
  });
}

TEST_CASE("gradients are unscaled and clipped by one factor and written back") {
  // Gradients scaled by a power of two have the same bits again.
  const float grad_scale = 65536;
  StepSignals scaled = signals_with_lr(0.01);
  scaled.grad_scale = &grad_scale;
  CHECK((bits_after(with_gradients_times(65536), writing_back(), scaled) ==
         bits_after(small_tensors(), writing_back(), signals_with_lr(0.01))));

  Clipping clipping;
  CHECK((bits_after(small_tensors(), writing_back(), clipping.signals()) ==
         bits_after(with_gradients_times(kClipFactor), writing_back(), signals_with_lr(0.01))));
  CHECK(clipping.grad_norm == 8);

  FakeStepTensors narrow = small_tensors(kHalfWithMaster);
  const FakeStepTensors before = small_tensors(kHalfWithMaster);
  step_on_host(narrow, writing_back(), clipping.signals());
  for (size_t t = 0; t < narrow.size(); ++t) {
    before[t][kGrad].multiply(kClipFactor);
    CHECK((narrow[t][kGrad].bits() == before[t][kGrad].bits()));
  }

  StepSignals limited = clipping.signals();  // the norm is within the limit
  limited.max_norm = 9;
  StepSignals unlimited = signals_with_lr(0.01);
  unlimited.grad_scale = &clipping.grad_scale;
  CHECK((bits_after(small_tensors(), adamw_options(), limited) ==
         bits_after(small_tensors(), adamw_options(), unlimited)));
}

TEST_CASE("gradients keep their bits without write_back_grads, even NaN payloads") {
  simt::for_each_schedule([] {
    FakeStepTensors tensors = small_tensors();
    const uint32_t signalling = 0x7fa12345;
    std::memcpy(tensors[2][kGrad].at<float>(3), &signalling, sizeof signalling);
    std::vector<std::string> before;
    for (const FakeStepTensor& tensor : tensors) before.emplace_back(tensor[kGrad].bits());
    Clipping clipping;
    step_on_host(tensors, adamw_options(), clipping.signals());
    for (size_t t = 0; t < tensors.size(); ++t) CHECK((tensors[t][kGrad].bits() == before[t]));
  });
}

TEST_CASE("a NaN norm makes parameters NaN, as in torch") {
  FakeStepTensors tensors = small_tensors();
  Clipping clipping;
  clipping.total_norm = kNan;
  step_on_host(tensors, adamw_options(), clipping.signals());
  CHECK(std::isnan(clipping.grad_norm));
  CHECK(std::isnan(tensors[1][kParam][0]));
  CHECK(std::isnan(tensors[2][kParam][130]));
}

TEST_CASE("scalars may be floats or doubles on the device, or host values") {
  const double lr = 0.01;  // not exact in float
  const float float_lr = 0.01f;
  const auto bits = [](ampfuse::StepScalar scalar) {
    return bits_after(small_tensors(), adamw_options(), signals_with(scalar));
  };
  CHECK((bits({&lr, true, 0}) == bits({nullptr, true, lr})));
  CHECK((bits({&float_lr, false, 0}) == bits({nullptr, false, double{float_lr}})));
  const double total_norm = 8 * 16;
  Clipping clipping;
  StepSignals in_double = clipping.signals();
  in_double.total_norm = {&total_norm, true, 0};
  CHECK((bits_after(small_tensors(), adamw_options(), in_double) ==
         bits_after(small_tensors(), adamw_options(), clipping.signals())));
}

TEST_CASE("a double learning rate is not rounded to float for double parameters") {
  AdamStepOptions options = adamw_options();
  options.eps = 0;
  const double lr = 0.1;
  FakeStepTensors tensors;
  tensors.push_back(random_step_tensor(kDoubles, 1, 0, {}, 1));
  for (const int column : {int{kParam}, int{kExpAvg}, int{kExpAvgSq}, int{kMaxExpAvgSq}})
    tensors[0][column].set(0, 0);
  step_on_host(tensors, options, signals_with({&lr, true, 0}));
  // The first step is lr for any gradient, up to ten roundings. 0.1f has a relative error of 1e-8.
  CHECK(std::fabs(tensors[0].number(0)) == Approx(0.1).epsilon(10 * 0x1p-53));
}
