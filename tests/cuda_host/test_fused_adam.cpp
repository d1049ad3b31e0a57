// Values that the fused_adam kernels compute, the packs that they use, and lists that take several
// launches. The rest is tested in test_fused_adam_signals.cpp and test_fused_adam_masters.cpp.
#include "adam_reference.h"
#include "catch.h"

using ampfuse::CounterTable;
using AdamTable = ampfuse::StepTable<AdamRule>;

namespace {

void check_against_reference(const StepKind& kind, AdamStepOptions options) {
  const FakeStepTensors before = step_boundary_tensors(kind);
  FakeStepTensors tensors = step_boundary_tensors(kind);
  const float grad_scale = 3;
  StepSignals signals = signals_with_lr(0.01);
  signals.grad_scale = &grad_scale;
  step_on_host(tensors, options, signals);
  CHECK(misses(before, tensors, options, 0.01, 1.0 / 3) == Misses{});
  for (size_t t = 0; t < tensors.size(); ++t) {
    CHECK(tensors[t].steps_taken == before[t].steps_taken + 1);
  }
}

// Returns tensors of one to three elements with step counts `first_count`, `first_count` + 1, ….
FakeStepTensors many_tensors(const StepKind& kind, int count, int first_count) {
  FakeStepTensors tensors;
  for (int t = 0; t < count; ++t) {
    const auto steps_taken = static_cast<float>(first_count + t);
    tensors.push_back(random_step_tensor(kind, 1 + t % 3, steps_taken, {}, t));
  }
  return tensors;
}

// Returns true if each of many_tensors(…, first_count) took the step of its own step count.
bool all_stepped(const FakeStepTensors& after, int first_count) {
  const FakeStepTensors before =
      many_tensors(after[0].kind, static_cast<int>(after.size()), first_count);
  return misses(before, after, adamw_options(), 0.01, 1) == Misses{};
}

}  // namespace

TEST_CASE("a step of AdamW matches the reference within roundings", "[asan]") {
  for (const StepKind& kind : kAdamKinds) {
    CAPTURE(&kind - kAdamKinds.data());
    check_against_reference(kind, adamw_options());
  }
}

TEST_CASE("a step is right in every schedule") {
  for (const StepKind& kind : {kFloats, kHalfWithMaster}) {
    simt::for_each_schedule([&] { check_against_reference(kind, adamw_options()); });
  }
}

TEST_CASE("a maximising step of Adam with small betas matches the reference", "[asan]") {
  AdamStepOptions options = adamw_options();
  options.decoupled = false;
  options.step.maximize = true;
  options.beta1 = 0.1;  // exp_avg is then interpolated starting from the gradient
  options.beta2 = 0.25;
  options.eps = 0.1;  // no longer negligible beside √v
  for (const StepKind& kind : kAdamKinds) {
    CAPTURE(&kind - kAdamKinds.data());
    check_against_reference(kind, options);
  }
}

TEST_CASE("packs and single elements give the same bits", "[asan]") {
  AdamStepOptions options = adamw_options();
  options.step.write_back_grads = true;
  for (const StepKind& kind :
       {kFloats, kFloatsWithAmsgrad, kHalfWithMaster, kNarrowWithRemainder}) {
    FakeStepTensors aligned = step_boundary_tensors(kind);
    step_on_host(aligned, options, signals_with_lr(0.01));
    for (int column = 0; column < kFirstUnit; ++column) {
      INFO("misaligned column " << column);
      StepOffsets offsets = {};
      offsets[column] = 1;
      FakeStepTensors misaligned = step_boundary_tensors(kind, offsets);
      step_on_host(misaligned, options, signals_with_lr(0.01));
      CHECK((bits_of(misaligned) == bits_of(aligned)));
    }
  }
}

TEST_CASE("a chunk is processed in packs only if all its columns are aligned") {
  const auto is_in_packs = [](const StepOffsets& offsets) {
    const FakeStepTensor tensor(kBFloat16WithMaster, 100, 0, offsets);
    return ampfuse::step_chunk_is_aligned<StepTypesOf<AdamRule, kBFloat16WithMaster>>(
        {tensor[kParam].at<c10::BFloat16>(),
         tensor[kGrad].at<c10::Half>(),
         tensor[kMaster].at<float>(),
         {tensor[kExpAvg].at<float>(), tensor[kExpAvgSq].at<float>()}},
        {});
  };
  CHECK(is_in_packs({0, 0, 0, 0, 0, 0}));
  CHECK(is_in_packs({4, 8, 4, 8, 4, 0}));  // packs have four elements
  CHECK_FALSE(is_in_packs({1, 0, 0, 0, 0, 0}));
  CHECK_FALSE(is_in_packs({0, 2, 0, 0, 0, 0}));
  CHECK_FALSE(is_in_packs({0, 0, 1, 0, 0, 0}));
  CHECK_FALSE(is_in_packs({0, 0, 0, 3, 0, 0}));
  CHECK_FALSE(is_in_packs({0, 0, 0, 0, 2, 0}));
}

TEST_CASE("all tensors of a list longer than a table step by their own counts") {
  FakeStepTensors none;
  CHECK(step_on_host(none, adamw_options(), signals_with_lr(0.01)) == 0);
  FakeStepTensors few = many_tensors(kFloats, 7, 0);
  CHECK(step_on_host(few, adamw_options(), signals_with_lr(0.01)) == 2);
  FakeStepTensors many = many_tensors(kFloats, AdamTable::kCapacity + 5, 0);
  CHECK(step_on_host(many, adamw_options(), signals_with_lr(0.01)) == 3);
  CHECK(all_stepped(many, 0));
  STATIC_REQUIRE(AdamTable::kCapacity >= 600);
  STATIC_REQUIRE(CounterTable::kCapacity >= 1400);
}

TEST_CASE("all counters of a list longer than a table are incremented once") {
  simt::for_each_schedule([] {
    std::vector<float> counts(CounterTable::kCapacity + 5);
    std::vector<HostCounter> counters;
    for (size_t t = 0; t < counts.size(); ++t) {
      counts[t] = static_cast<float>(t % 100);
      counters.push_back({&counts[t]});
    }
    HostPlan<AdamRule, float> plan(counts.size());
    CHECK(prepare_on_host(counters, adamw_options(), signals_with_lr(0.01), plan) == 2);
    for (size_t t = 0; t < counts.size(); ++t) {
      const auto step = static_cast<double>(t % 100 + 1);
      REQUIRE(counts[t] == step);
      // The step size is 0.01·√(1−0.999ᵗ)/(1−0.9ᵗ), rounded from double to fp32.
      const double size = 0.01 * std::sqrt(1 - std::pow(0.999, step)) / (1 - std::pow(0.9, step));
      REQUIRE(plan.steps[t].of_rule.size == Approx(size).epsilon(0x1p-23));
      REQUIRE(plan.steps[t].of_rule.decay == 0.001f);
    }
  });
}

TEST_CASE("tensors of two types share one launch of the prepare kernel") {
  for (const int count : {5, AdamTable::kCapacity + 5}) {  // of the second type: one table, or two
    simt::for_each_schedule([&] {
      FakeStepTensors plain = many_tensors(kFloats, 7, 0);
      FakeStepTensors mixed = many_tensors(kBFloat16WithMaster, count, 20);
      std::vector<HostCounter> counters;
      for (FakeStepTensor& tensor : plain) counters.push_back({&tensor.steps_taken});
      for (FakeStepTensor& tensor : mixed) counters.push_back({&tensor.steps_taken});
      HostPlan<AdamRule, float> plan(counters.size());
      CHECK(prepare_on_host(counters, adamw_options(), signals_with_lr(0.01), plan) == 1);
      CHECK(update_on_host(plain, adamw_options(), 0, plan) == 1);
      CHECK(update_on_host(mixed, adamw_options(), 7, plan) == (count == 5 ? 1 : 2));
      CHECK(all_stepped(plain, 0));
      CHECK(all_stepped(mixed, 20));
    });
  }
}
