// Parameters that are stepped with more bits than the model has: fp32 masters and remainders.
#include <algorithm>

#include "catch.h"
#include "step_on_host.h"

using ampfuse::math::join_float;
using ampfuse::math::split_float;
using ampfuse::math::SplitFloat;

namespace {

uint32_t bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}

float from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

float as_bfloat16(uint16_t upper) {
  return from_bits(uint32_t{upper} << 16);
}

FakeStepTensors list_of(const StepKind& kind, std::initializer_list<int64_t> sizes) {
  FakeStepTensors tensors;
  for (const int64_t size : sizes) {
    tensors.push_back(random_step_tensor(kind, size, 0, {}, static_cast<uint32_t>(size)));
  }
  return tensors;
}

// Returns tensors after five steps with gradients that every type has. If `aggressive`, updates are
// large: lr is 1 and betas are (0.1, 0.25). Otherwise lr and betas are AdamW's defaults. Some
// parameters are extreme.
FakeStepTensors trained(const StepKind& kind, bool aggressive) {
  AdamStepOptions options = adamw_options();
  if (aggressive) {
    options.beta1 = 0.1;
    options.beta2 = 0.25;
  }
  FakeStepTensors tensors = list_of(kind, {1, 130, 2053});
  const float extremes[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::denorm_min(),
                            -0.0f,
                            from_bits(0x3f808000)};  // midway between two bfloat16
  int64_t index = 0;
  for (const float extreme : extremes) tensors[1].set_number(index++, extreme);
  for (uint32_t step = 0; step < 5; ++step) {
    for (FakeStepTensor& tensor : tensors) {
      const Numbers rounded(kBFloat16, tensor.size);
      rounded.fill(random_values(tensor.size, 100 + step));
      const Numbers again(kHalf, tensor.size);
      for (int64_t i = 0; i < tensor.size; ++i) {
        again.set(i, rounded[i]);
        tensor[kGrad].set(i, again[i]);
      }
    }
    step_on_host(tensors, options, signals_with_lr(aggressive ? 1 : 1e-3));
  }
  return tensors;
}

// The upper 16 bits of zero, the least and the largest subnormal, the least normal number, 1 and
// both its neighbours, the two largest bfloat16, infinity (signalling NaNs if lower bits are set),
// signalling NaNs, and quiet NaNs.
constexpr uint16_t kEdges[] = {0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x7f7e,
                               0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7fc1, 0x7fff};

}  // namespace

TEST_CASE("masters and remainders step to the bits of fp32 parameters") {
  const bool aggressive = GENERATE(true, false);
  for (const StepKind& kind : {kBFloat16WithMaster, kHalfWithMaster, kWithRemainder}) {
    const FakeStepTensors plain =
        trained(kind.moments == 3 ? kFloatsWithAmsgrad : kFloats, aggressive);
    simt::for_each_schedule([&] {
      const FakeStepTensors tensors = trained(kind, aggressive);
      for (size_t t = 0; t < plain.size(); ++t) {
        int misses = 0;
        for (int64_t i = 0; i < plain[t].size; ++i) {
          misses += bits(tensors[t].number(i)) != bits(plain[t].number(i));
          if (kind.master != Master::kFloat) continue;
          // The parameter is its master, cast to 16 bits.
          misses += bits(tensors[t][kParam][i]) != bits(with_type(kind.param, [&]<typename T>() {
                      return static_cast<float>(static_cast<T>(tensors[t][kMaster].at<float>()[i]));
                    }));
        }
        CHECK(misses == 0);
        for (const int column : {kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
          CHECK((tensors[t][column].bits() == plain[t][column].bits()));
        }
      }
    });
  }
}

TEST_CASE("a step with masters does not depend on the old parameters") {
  FakeStepTensors tensors = list_of(kBFloat16WithMaster, {131});
  FakeStepTensors stale = list_of(kBFloat16WithMaster, {131});
  stale[0][kParam].multiply(NAN);
  step_on_host(tensors, adamw_options(), signals_with_lr(0.01));
  step_on_host(stale, adamw_options(), signals_with_lr(0.01));
  CHECK((bits_of(stale) == bits_of(tensors)));
}

TEST_CASE("masters adopt written parameters and keep elements that were not written") {
  AdamStepOptions options = adamw_options();
  options.weight_decay = 0;
  options.step.adopt_params = true;
  for (const StepKind& kind : {kBFloat16WithMaster, kHalfWithMaster}) {
    simt::for_each_schedule([&] {
      FakeStepTensors tensors = list_of(kind, {1, 5, 128, 2048, 2049, 8191});
      FakeStepTensors expected = list_of(kind, {1, 5, 128, 2048, 2049, 8191});
      for (size_t t = 0; t < tensors.size(); ++t) {
        // All of the second chunk is written, the last of the third, and the start of other chunks.
        for (int64_t i = 0; i < tensors[t].size; ++i) {
          const int64_t chunk = i / 2048;
          const bool is_written = chunk == 1 || (chunk == 2 ? i % 2048 == 2047 : i % 2048 < 200);
          if (!is_written) continue;
          tensors[t][kParam].set(i, static_cast<double>(3 + i % 7));
          expected[t].set_number(i, static_cast<double>(3 + i % 7));
        }
      }
      step_on_host(tensors, options, signals_with_lr(0));
      for (size_t t = 0; t < tensors.size(); ++t) {
        CHECK((tensors[t][kMaster].bits() == expected[t][kMaster].bits()));
        CHECK((tensors[t][kParam].bits() == expected[t][kParam].bits()));
      }
    });
  }
}

TEST_CASE("adopt_params does not change the step of parameters that were not written") {
  AdamStepOptions options = adamw_options();
  std::vector<std::string> results;
  for (const bool adopt : {false, true}) {
    options.step.adopt_params = adopt;
    // These include NaN and infinities.
    FakeStepTensors tensors = trained(kBFloat16WithMaster, /*aggressive=*/true);
    step_on_host(tensors, options, signals_with_lr(0.01));
    results.push_back(bits_of(tensors));
  }
  CHECK((results[0] == results[1]));
}

TEST_CASE("a skipped step does not adopt written parameters") {
  AdamStepOptions options = adamw_options();
  options.step.adopt_params = true;
  FakeStepTensors tensors = list_of(kBFloat16WithMaster, {131});
  for (int64_t i = 0; i < 131; ++i) tensors[0][kParam].set(i, 9);
  const std::string before = bits_of(tensors);
  const float found_inf = 1;
  StepSignals signals = signals_with_lr(0.01);
  signals.found_inf = &found_inf;
  step_on_host(tensors, options, signals);
  CHECK((bits_of(tensors) == before));
}

TEST_CASE("a float splits into the nearest bfloat16 and a remainder that restores it") {
  for (const uint16_t edge : kEdges) {
    INFO("upper half " << edge);
    int misses = 0;
    for (uint32_t lower = 0; lower < 2 * 65536; ++lower) {
      const uint32_t sign = lower < 65536 ? 0 : 0x80000000;
      const float x = from_bits(sign | uint32_t{edge} << 16 | lower % 65536);
      const SplitFloat split = split_float(x);
      // NaNs become quiet.
      const uint32_t quiet = std::isnan(x) ? 0x00400000 : 0;
      misses += bits(join_float(split)) != (bits(x) | quiet);
      const SplitFloat again = split_float(join_float(split));
      misses += again.bfloat16 != split.bfloat16 || again.remainder != split.remainder;

      const float half = as_bfloat16(split.bfloat16);
      const float nearest = static_cast<float>(static_cast<c10::BFloat16>(x));  // ties to even
      if (std::isnan(x)) {
        misses += !std::isnan(half);
      } else if (bits(half) == bits(nearest)) {
        // If x is a tie, the other neighbour must not be larger in magnitude.
        misses += (bits(x) & 0xffff) == 0x8000 && std::fabs(half) <= std::fabs(x);
      } else {
        misses += std::fabs(double{half} - x) != std::fabs(double{nearest} - x) ||
                  std::fabs(half) <= std::fabs(nearest);
      }
    }
    CHECK(misses == 0);
  }
  // The largest float, and a NaN with all its payload in the lower bits.
  const float largest = std::numeric_limits<float>::max();
  CHECK(split_float(largest).remainder == -1);
  CHECK(as_bfloat16(split_float(largest).bfloat16) == std::numeric_limits<float>::infinity());
  CHECK(bits(join_float(split_float(from_bits(0xff800001)))) == 0xffc00001);
}

TEST_CASE("a bfloat16 that is not NaN and any remainder join to a number that is not NaN") {
  for (const uint16_t upper : {0x0000, 0x0001, 0x3f80, 0x7f7f, 0x7f80}) {
    INFO("upper half " << upper);
    int made = 0;
    for (const uint16_t sign : {0x0000, 0x8000}) {
      for (int remainder = -32768; remainder < 32768; ++remainder) {
        const auto bfloat16 = static_cast<uint16_t>(upper | sign);
        made += std::isnan(join_float({bfloat16, static_cast<int16_t>(remainder)}));
      }
    }
    CHECK(made == 0);
  }
}
