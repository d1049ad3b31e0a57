// Values that the kernels of fused_sgd compute. What they share with those of fused_adam (signals,
// long lists, adopted parameters) is tested with fused_adam.
#include "bounded.h"
#include "catch.h"
#include "step_on_host.h"

namespace {

SgdStepOptions sgd_options(double momentum) {
  return {{.momentum = momentum, .dampening = 0.25, .weight_decay = 0.1, .nesterov = false}, {}};
}

struct SgdElement {
  Bounded param;
  Bounded buffer;
};

// Returns an element after a step, by torch's formulae. `grad` is unscaled.
SgdElement sgd_reference(SgdElement x, Bounded grad, const SgdStepOptions& options, double lr,
                         const FakeStepTensor& before) {
  const Type type = x.param.type;
  const auto constant = [&](double value) { return Bounded::rounded(type, value); };
  if (options.step.maximize) grad.value = -grad.value;
  grad = grad + constant(options.weight_decay) * x.param;
  if (before.kind.moments == 1) {
    x.buffer = before.steps_taken == 0
                   ? grad
                   : constant(options.momentum) * x.buffer + constant(1 - options.dampening) * grad;
    grad = options.nesterov ? grad + constant(options.momentum) * x.buffer : x.buffer;
  }
  x.param = x.param - constant(lr) * grad;
  return x;
}

// Checks a step of tensors with sizes on both sides of each unit of the kernel.
void check_against_reference(const StepKind& kind, const SgdStepOptions& options) {
  const FakeStepTensors before = step_boundary_tensors(kind);  // some have taken no step
  FakeStepTensors after = step_boundary_tensors(kind);
  const float grad_scale = 3;
  StepSignals signals = signals_with_lr(0.01);
  signals.grad_scale = &grad_scale;
  step_on_host(after, options, signals);
  int misses = 0;
  for (size_t t = 0; t < before.size(); ++t) {
    CHECK(after[t].steps_taken == before[t].steps_taken + 1);
    const Type type = arithmetic_of(kind.param);
    for (int64_t i = 0; i < before[t].size; ++i) {
      const Bounded grad =
          Bounded{before[t][kGrad][i], type} * Bounded::rounded(type, 1.0L / grad_scale);
      const Bounded buffer = {kind.moments == 1 ? before[t][kMomentumBuffer][i] : 0, type};
      const SgdElement x =
          sgd_reference({{before[t].number(i), type}, buffer}, grad, options, 0.01, before[t]);
      const bool has_master = kind.master != Master::kNone;
      misses += !(has_master ? x.param : x.param.in(kind.param)).admits(after[t].number(i));
      if (kind.moments == 1) {
        misses += !x.buffer.in(kind.state).admits(after[t][kMomentumBuffer][i]);
      }
    }
  }
  CHECK(misses == 0);
}

FakeStepTensors sgd_tensors(const StepKind& kind, float steps_taken) {
  FakeStepTensors tensors;
  for (const int64_t size : {0, 1, 131}) {
    tensors.push_back(random_step_tensor(kind, size, steps_taken, {}, static_cast<uint32_t>(size)));
  }
  return tensors;
}

}  // namespace

TEST_CASE("a step of SGD matches the reference within roundings", "[asan]") {
  const bool varied = GENERATE(false, true);
  for (const StepKind& kind : kSgdKinds) {
    CAPTURE(&kind - kSgdKinds.data(), varied);
    SgdStepOptions options = sgd_options(kind.moments == 1 ? 0.9 : 0);
    options.nesterov = options.step.maximize = varied;
    check_against_reference(kind, options);
  }
}

// The CPU's kernel has the bits of torch's loop, which tests in Python compare.
TEST_CASE("a step of SGD rounds where torch's loop rounds", "[asan]") {
  const float momentum = 0.9f, rest = 0.75f, decay = 0.1f, lr = 0.01f;
  SgdStepOptions options = sgd_options(momentum);
  options.weight_decay = decay;
  options.nesterov = GENERATE(false, true);
  const FakeStepTensors before = step_boundary_tensors(kSgdFloats);
  FakeStepTensors after = step_boundary_tensors(kSgdFloats);
  step_on_host(after, options, signals_with_lr(lr));
  for (size_t t = 0; t < before.size(); ++t) {
    int misses = 0;
    for (int64_t i = 0; i < before[t].size; ++i) {
      const float param = before[t][kParam].at<float>()[i];
      float grad = std::fma(decay, param, before[t][kGrad].at<float>()[i]);
      const float old = momentum * before[t][kMomentumBuffer].at<float>()[i];
      const float buffer = before[t].steps_taken == 0 ? grad : std::fma(rest, grad, old);
      grad = options.nesterov ? std::fma(momentum, buffer, grad) : buffer;
      misses += after[t][kMomentumBuffer].at<float>()[i] != buffer;
      misses += after[t][kParam].at<float>()[i] != std::fma(-lr, grad, param);
    }
    CHECK(misses == 0);
  }
}

TEST_CASE("a step of SGD is right in every schedule") {
  for (const StepKind& kind : {kSgdHalfWithMaster, kSgdFloatsAlone}) {
    simt::for_each_schedule(
        [&] { check_against_reference(kind, sgd_options(kind.moments == 1 ? 0.9 : 0)); });
  }
}

TEST_CASE("the momentum starts with the first step that is taken, whatever the buffer holds") {
  simt::for_each_schedule([] {
    FakeStepTensors tensors = sgd_tensors(kSgdHalfWithMaster, 0);
    FakeStepTensors expected = sgd_tensors(kSgdHalfWithMaster, 0);
    for (FakeStepTensor& tensor : tensors) tensor[kMomentumBuffer].multiply(NAN);
    float found_inf = 1;
    StepSignals signals = signals_with_lr(0.01);
    signals.found_inf = &found_inf;
    step_on_host(tensors, sgd_options(0.9), signals);
    CHECK(std::isnan(tensors[2][kMomentumBuffer][0]));
    found_inf = 0;
    step_on_host(tensors, sgd_options(0.9), signals);
    step_on_host(expected, sgd_options(0.9), signals);
    CHECK((bits_of(tensors) == bits_of(expected)));
  });
}

TEST_CASE("without momentum tensors need no step counters") {
  FakeStepTensors counted = sgd_tensors(kSgdBFloat16WithMaster, 5);
  FakeStepTensors uncounted = sgd_tensors(kSgdBFloat16WithMaster, -1);
  step_on_host(counted, sgd_options(0), signals_with_lr(0.01));
  step_on_host(uncounted, sgd_options(0), signals_with_lr(0.01));
  for (size_t t = 0; t < counted.size(); ++t) {
    CHECK(uncounted[t].steps_taken == -1);
    CHECK((uncounted[t][kMaster].bits() == counted[t][kMaster].bits()));
    CHECK((uncounted[t][kParam].bits() == counted[t][kParam].bits()));
  }
}

TEST_CASE("masters and remainders of SGD step to the bits of fp32 parameters", "[asan]") {
  const auto trained = [](const StepKind& kind) {
    FakeStepTensors tensors = sgd_tensors(kind, 0);
    for (uint32_t step = 0; step < 3; ++step) {
      for (FakeStepTensor& tensor : tensors) {
        for (int64_t i = 0; i < tensor.size; ++i) {
          tensor[kGrad].set(i, static_cast<double>((i + step) % 7) - 3);
        }
      }
      step_on_host(tensors, sgd_options(0.9), signals_with_lr(0.01));
    }
    return tensors;
  };
  const FakeStepTensors plain = trained(kSgdFloats);
  const FakeStepTensors with_masters = trained(kSgdHalfWithMaster);
  for (int64_t i = 0; i < 131; ++i) {
    CHECK(with_masters[2].number(i) == plain[2].number(i));
    CHECK(with_masters[2][kMomentumBuffer][i] == plain[2][kMomentumBuffer][i]);
  }
  // The momentum of this kind is bfloat16, so only the first step has the same bits.
  FakeStepTensors first = sgd_tensors(kSgdWithRemainder, 0);
  FakeStepTensors first_plain = sgd_tensors(kSgdFloats, 0);
  for (int64_t i = 0; i < 131; ++i) {
    first[2][kGrad].set(i, 1);
    first_plain[2][kGrad].set(i, 1);
  }
  SgdStepOptions options = sgd_options(0.9);
  step_on_host(first, options, signals_with_lr(0.01));
  step_on_host(first_plain, options, signals_with_lr(0.01));
  for (int64_t i = 0; i < 131; ++i) CHECK(first[2].number(i) == first_plain[2].number(i));
}
