// Steps with moments in 8 bits, with random rounding and with averages. What they share with other
// steps (signals, long lists, adopted parameters) is tested in the other files.
#include "adam_reference.h"
#include "catch.h"
#include "extended_reference.h"

namespace {

constexpr uint64_t kSeed = 0x123456789abcdef0;
constexpr double kDecay = 0.75;

AdamStepOptions extended_options(const StepKind& kind) {
  AdamStepOptions options = adamw_options();
  options.step.seed = kSeed;
  options.step.round_at_random = kind.rounds_at_random;
  options.step.ema_weight = 1 - kDecay;
  return options;
}

// Returns tensors on both sides of each unit of the kernel. Their first indices are those of
// shards: they are no multiples of anything.
FakeStepTensors extended_tensors(const StepKind& kind, const StepOffsets& offsets = {}) {
  FakeStepTensors tensors = step_boundary_tensors(kind, offsets);
  int64_t index = 0;
  for (FakeStepTensor& tensor : tensors) {
    tensor.first_index = index;
    index += tensor.size + 3;
  }
  return tensors;
}

reference::Codes codes_of(const FakeStepTensor& tensor, int moment) {
  reference::Codes codes = {moment == 0, {}, {}};
  const Numbers& stored = tensor[kFirstMoment + moment];
  for (int64_t i = 0; i < stored.size; ++i) codes.codes.push_back(static_cast<int>(stored[i]));
  const Numbers& units = tensor[kFirstUnit + moment];
  for (int64_t g = 0; g < units.size; ++g) codes.units.push_back(units.at<uint16_t>()[g]);
  return codes;
}

// Returns a tensor whose moments are numbers: those that the codes of `tensor` stand for.
FakeStepTensor with_float_moments(const FakeStepTensor& tensor) {
  StepKind kind = kFloats;
  kind.grad = kFloat;
  FakeStepTensor plain(kind, tensor.size, tensor.steps_taken, {});
  const reference::Codes codes[] = {codes_of(tensor, 0), codes_of(tensor, 1)};
  for (int64_t i = 0; i < tensor.size; ++i) {
    plain.set_number(i, tensor.number(i));
    plain[kGrad].set(i, tensor[kGrad][i]);
    for (int m = 0; m < 2; ++m) {
      plain[kFirstMoment + m].set(
          i, tensor.kind.is_coded() ? codes[m].decoded(i) : tensor[kFirstMoment + m][i]);
    }
  }
  return plain;
}

std::vector<float> floats_of(const Numbers& numbers) {
  return {numbers.at<float>(), numbers.at<float>() + numbers.size};
}

// Checks the columns of one tensor against a plain step of the same numbers in fp32.
void check_tensor(const FakeStepTensor& before, const FakeStepTensor& after) {
  const StepKind& kind = before.kind;
  FakeStepTensors plain;
  plain.push_back(with_float_moments(before));
  AdamStepOptions options = extended_options(kind);
  step_on_host(plain, options, signals_with_lr(0.01));
  const FakeStepTensor& stepped = plain[0];
  const auto count = static_cast<uint32_t>(after.steps_taken);
  const auto random = [&](int64_t i) {
    return reference::random_of(kSeed, count, before.first_index + i);
  };
  int misses = 0;
  for (int m = 0; m < 2 && kind.is_coded(); ++m) {
    reference::Codes expected = codes_of(before, m);
    expected.encode(floats_of(stepped[kFirstMoment + m]), [&](size_t i) {
      return reference::thirteen_bits(random(i), m == 0 ? 0x6255 : 0xA3D9);
    });
    const reference::Codes actual = codes_of(after, m);
    CHECK(actual.units == expected.units);
    CHECK(actual.codes == expected.codes);
  }
  for (int64_t i = 0; i < before.size; ++i) {
    const float number = stepped[kParam].at<float>()[i];
    if (kind.master != Master::kNone || kind.param == kFloat) {
      misses += after.number(i) != number;
    } else if (kind.param == kBFloat16 && kind.rounds_at_random) {
      misses += after.number(i) != reference::round_to_bfloat16(number, random(i));
    }
    if (kind.ema == NumberType::kNone) continue;
    const auto old = static_cast<float>(before[kEma][i]);
    float average = count == 1 ? number : std::fma(0.25f, number - old, old);
    if (kind.ema == NumberType::kBFloat16) {
      average = reference::round_to_bfloat16(average, random(i) * 0x9E37 & 0xffff);
    }
    misses += after[kEma][i] != average;
  }
  CHECK(misses == 0);
}

void check_step(const StepKind& kind) {
  const FakeStepTensors before = extended_tensors(kind);
  FakeStepTensors after = extended_tensors(kind);
  step_on_host(after, extended_options(kind), signals_with_lr(0.01));
  for (size_t t = 0; t < before.size(); ++t) {
    CHECK(after[t].steps_taken == before[t].steps_taken + 1);
    check_tensor(before[t], after[t]);
  }
}

}  // namespace

TEST_CASE("an extended step has the bits of its definition", "[asan]") {
  for (const StepKind& kind : kExtendedAdamKinds) {
    if (kind.param == kDouble || kind.moments == 3) continue;
    CAPTURE(&kind - kExtendedAdamKinds.data());
    check_step(kind);
  }
}

TEST_CASE("an extended step is right in every schedule") {
  for (const StepKind& kind : {kCodedBFloat16Alone, kCodedWithRemainder}) {
    simt::for_each_schedule([&] { check_step(kind); });
  }
}

TEST_CASE("averages of doubles are averages of the parameters", "[asan]") {
  const FakeStepTensors before = extended_tensors(kAveragedDoubles);
  FakeStepTensors after = extended_tensors(kAveragedDoubles);
  step_on_host(after, extended_options(kAveragedDoubles), signals_with_lr(0.01));
  int misses = 0;
  for (size_t t = 0; t < before.size(); ++t) {
    for (int64_t i = 0; i < before[t].size; ++i) {
      const double old = before[t][kEma][i];
      const double x = after[t][kParam][i];
      misses += after[t][kEma][i] != (after[t].steps_taken == 1 ? x : std::fma(0.25, x - old, old));
    }
  }
  CHECK(misses == 0);
}

TEST_CASE("a bfloat16 that is rounded at random is a neighbour of what is rounded to nearest",
          "[asan]") {
  FakeStepTensors nearest = extended_tensors(kRoundedBFloat16);
  FakeStepTensors at_random = extended_tensors(kRoundedBFloat16);
  AdamStepOptions options = extended_options(kRoundedBFloat16);
  step_on_host(at_random, options, signals_with_lr(0.01));
  options.step.round_at_random = false;
  step_on_host(nearest, options, signals_with_lr(0.01));
  int64_t different = 0;
  int64_t all = 0;
  for (size_t t = 0; t < nearest.size(); ++t) {
    for (int64_t i = 0; i < nearest[t].size; ++i) {
      const int distance =
          std::abs(nearest[t][kParam].at<int16_t>()[i] - at_random[t][kParam].at<int16_t>()[i]);
      CHECK(distance <= 1);
      different += distance;
      ++all;
    }
  }
  CHECK(different > all / 8);  // a quarter on average
  CHECK(different < all / 2);
}

TEST_CASE("packs and single elements of extended steps give the same bits", "[asan]") {
  for (const StepKind& kind : {kCodedWithRemainder, kCodedBFloat16Alone, kAveragedWithRemainder}) {
    AdamStepOptions options = extended_options(kind);
    options.step.write_back_grads = true;
    FakeStepTensors aligned = extended_tensors(kind);
    step_on_host(aligned, options, signals_with_lr(0.01));
    for (const int column :
         {int(kParam), int(kGrad), int(kMaster), int(kFirstMoment), kFirstMoment + 1, int(kEma)}) {
      INFO("misaligned column " << column);
      StepOffsets offsets = {};
      offsets[column] = 1;
      FakeStepTensors misaligned = extended_tensors(kind, offsets);
      step_on_host(misaligned, options, signals_with_lr(0.01));
      CHECK((bits_of(misaligned) == bits_of(aligned)));
    }
  }
}

TEST_CASE("a skipped extended step writes nothing") {
  for (const StepKind& kind : {kCodedBFloat16Alone, kAveragedWithRemainder}) {
    FakeStepTensors tensors = extended_tensors(kind);
    const std::string before = bits_of(tensors);
    const float found_inf = 1;
    StepSignals signals = signals_with_lr(0.01);
    signals.found_inf = &found_inf;
    step_on_host(tensors, extended_options(kind), signals);
    CHECK((bits_of(tensors) == before));
  }
}

TEST_CASE("shards step to the bits of the whole tensor", "[asan]") {
  const StepKind& kind = kCodedBFloat16Alone;
  FakeStepTensors whole;
  whole.push_back(random_step_tensor(kind, 4096, 3, {}, 1));
  FakeStepTensors shards;
  for (const int64_t size : {1024, 3072}) {
    shards.emplace_back(kind, size, 3.0f, StepOffsets{});
    FakeStepTensor& shard = shards.back();
    shard.first_index = size == 1024 ? 0 : 1024;
    for (int column = 0; column < kMostColumns; ++column) {
      const int64_t groups = ampfuse::math::is_unit(column) ? 32 : 1;
      for (int64_t i = 0; i < shard[column].size; ++i) {
        shard[column].set(i, whole[0][column][shard.first_index / groups + i]);
      }
    }
  }
  step_on_host(whole, extended_options(kind), signals_with_lr(0.01));
  step_on_host(shards, extended_options(kind), signals_with_lr(0.01));
  for (int column = 0; column < kMostColumns; ++column) {
    CHECK((std::string(shards[0][column].bits()) + std::string(shards[1][column].bits()) ==
           whole[0][column].bits()));
  }
}

TEST_CASE("extended lists that are longer than a table take more launches") {
  FakeStepTensors many;
  for (int t = 0; t < 500; ++t) {
    many.push_back(random_step_tensor(kCodedWithRemainder, 1 + t % 40, 3, {}, t));
  }
  CHECK(step_on_host(many, extended_options(kCodedWithRemainder), signals_with_lr(0.01)) == 3);
  // 10,000 tensors take 7 launches for counters and 25 for elements.
  STATIC_REQUIRE(7 * ampfuse::CounterTable::kCapacity >= 10000);
  STATIC_REQUIRE(25 * (ampfuse::StepTable<AdamRule>::kCapacity * 6 / kMostColumns) >= 10000);
}

TEST_CASE("SGD with momentum in 8 bits starts it with the first gradient", "[asan]") {
  SgdStepOptions options = {
      {.momentum = 0.9, .dampening = 0.25, .weight_decay = 0, .nesterov = false}, {}};
  options.step.seed = kSeed;
  FakeStepTensors tensors;
  tensors.push_back(random_step_tensor(kSgdCoded, 131, 0, {}, 1));
  step_on_host(tensors, options, signals_with_lr(0.01));
  std::vector<float> grads;
  for (int64_t i = 0; i < 131; ++i) grads.push_back(static_cast<float>(tensors[0][kGrad][i]));
  reference::Codes expected = codes_of(tensors[0], 0);
  expected.encode(grads, [](size_t i) {
    return reference::thirteen_bits(reference::random_of(kSeed, 1, static_cast<int64_t>(i)),
                                    0x6255);
  });
  CHECK(codes_of(tensors[0], 0).codes == expected.codes);
  CHECK(codes_of(tensors[0], 0).units == expected.units);
}

TEST_CASE("SGD without momentum counts the steps of its random numbers") {
  SgdStepOptions options = {{.momentum = 0, .dampening = 0, .weight_decay = 0, .nesterov = false},
                            {}};
  options.step.round_at_random = true;
  FakeStepTensors first;
  first.push_back(random_step_tensor(kSgdRounded, 131, 0, {}, 1));
  FakeStepTensors second;
  second.push_back(random_step_tensor(kSgdRounded, 131, 1, {}, 1));
  step_on_host(first, options, signals_with_lr(0.01));
  step_on_host(second, options, signals_with_lr(0.01));
  CHECK(first[0].steps_taken == 1);
  CHECK((first[0][kParam].bits() != second[0][kParam].bits()));
}
