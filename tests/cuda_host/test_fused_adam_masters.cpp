// Parameters that are stepped with more bits than the model has: fp32 masters and remainders.
#include "simt/simt.h"

#include <algorithm>

#include "adam_on_host.h"
#include "catch.h"

using ampfuse::AdamTypes;
using ampfuse::Master;
using ampfuse::math::AdamOptions;
using ampfuse::math::SplitFloat;
using BFloat16 = c10::BFloat16;
using Half = c10::Half;

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

// Returns tensors after five steps with bfloat16 gradients. If `aggressive`, updates are large: lr
// is 1 and betas are (0.1, 0.25). Otherwise lr and betas are AdamW's defaults. Some parameters are
// extreme.
template <typename Types>
FakeAdamTensors<Types> trained(bool aggressive) {
  AdamOptions options = adamw_options();
  options.amsgrad = Types::kAmsgrad;
  if (aggressive) {
    options.beta1 = 0.1;
    options.beta2 = 0.25;
  }
  FakeAdamTensors<Types> tensors;
  for (const int64_t size : {1, 130, 2053}) {
    tensors.push_back(random_adam_tensor<Types>(size, 0, {}, static_cast<uint32_t>(size)));
  }
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
    for (auto& tensor : tensors) fill_gradients(tensor, 100 + step);
    step_on_host(tensors, options, signals_with_lr(aggressive ? 1 : 1e-3));
  }
  return tensors;
}

template <typename T>
std::string bits_of_column(const FakeTensor<T>& column) {
  return {reinterpret_cast<const char*>(column.data()), column.size * sizeof(T)};
}

template <typename Types, typename Plain>
void check_same_numbers(const FakeAdamTensors<Types>& with_masters,
                        const FakeAdamTensors<Plain>& plain) {
  for (size_t t = 0; t < plain.size(); ++t) {
    for (int64_t i = 0; i < plain[t].size; ++i) {
      REQUIRE(bits(with_masters[t].number(i)) == bits(plain[t].number(i)));
    }
    CHECK((bits_of_column(with_masters[t].exp_avg) == bits_of_column(plain[t].exp_avg)));
    CHECK((bits_of_column(with_masters[t].exp_avg_sq) == bits_of_column(plain[t].exp_avg_sq)));
    CHECK((bits_of_column(with_masters[t].max_exp_avg_sq) ==
           bits_of_column(plain[t].max_exp_avg_sq)));
  }
}

// The upper 16 bits of zero, the least and the largest subnormal, the least normal number, 1 and
// both its neighbours, the two largest bfloat16, infinity (signalling NaNs if lower bits are set),
// signalling NaNs, and quiet NaNs.
constexpr uint16_t kEdges[] = {0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x7f7e,
                               0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7fc1, 0x7fff};

// Counts the floats with these upper bits, of either sign, for which `holds(x, its split)` is
// false.
template <typename Predicate>
int failures(uint16_t edge, Predicate holds) {
  int failures = 0;
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t lower = 0; lower < 65536; ++lower) {
      const float x = from_bits(sign | uint32_t{edge} << 16 | lower);
      failures += !holds(x, ampfuse::math::split_float(x));
    }
  }
  return failures;
}

}  // namespace

TEMPLATE_TEST_CASE("masters and remainders step to the bits of fp32 parameters", "",
                   (AdamTypes<Half, BFloat16, float, Master::kFloat, false>),
                   (AdamTypes<BFloat16, BFloat16, float, Master::kFloat, true>),
                   (AdamTypes<uint16_t, BFloat16, float, Master::kRemainder, false>),
                   (AdamTypes<uint16_t, BFloat16, float, Master::kRemainder, true>)) {
  using Plain = AdamTypes<float, BFloat16, float, Master::kNone, TestType::kAmsgrad>;
  const bool aggressive = GENERATE(true, false);
  const auto plain = trained<Plain>(aggressive);
  simt::for_each_schedule([&] { check_same_numbers(trained<TestType>(aggressive), plain); });
}

TEMPLATE_TEST_CASE("parameters are their masters, cast to 16 bits", "", Half, BFloat16) {
  using Types = AdamTypes<TestType, BFloat16, float, Master::kFloat, false>;
  for (const auto& tensor : trained<Types>(/*aggressive=*/true)) {
    for (int64_t i = 0; i < tensor.size; ++i) {
      const auto cast = static_cast<TestType>(tensor.master.data()[i]);
      REQUIRE(tensor.param.data()[i].x == cast.x);
    }
  }
}

TEST_CASE("a step with masters does not depend on the old parameters") {
  using Types = AdamTypes<BFloat16, BFloat16, float, Master::kFloat, false>;
  FakeAdamTensors<Types> tensors;
  FakeAdamTensors<Types> stale;
  tensors.push_back(random_adam_tensor<Types>(131, 0, {}, 1));
  stale.push_back(random_adam_tensor<Types>(131, 0, {}, 1));
  std::fill_n(stale[0].param.data(), 131, std::numeric_limits<BFloat16>::quiet_NaN());
  step_on_host(tensors, adamw_options(), signals_with_lr(0.01));
  step_on_host(stale, adamw_options(), signals_with_lr(0.01));
  CHECK((bits_of(stale) == bits_of(tensors)));
}

TEMPLATE_TEST_CASE("masters adopt written parameters and keep elements that were not written", "",
                   Half, BFloat16) {
  using Types = AdamTypes<TestType, BFloat16, float, Master::kFloat, false>;
  AdamOptions options = adamw_options();
  options.weight_decay = 0;
  options.adopt_params = true;
  simt::for_each_schedule([&] {
    FakeAdamTensors<Types> tensors;
    for (const int64_t size : {1, 5, 128, 2048, 2049, 8191}) {
      tensors.push_back(random_adam_tensor<Types>(size, 0, {}, static_cast<uint32_t>(size)));
    }
    std::vector<std::vector<float>> expected;
    for (auto& tensor : tensors) {
      expected.emplace_back(tensor.master.data(), tensor.master.data() + tensor.size);
      // All of the second chunk is written, the end of the third, and the start of other chunks.
      for (int64_t i = 0; i < tensor.size; ++i) {
        const int64_t chunk = i / 2048;
        const bool is_written = chunk == 1 || (chunk == 2 ? i % 2048 >= 1930 : i % 2048 < 200);
        if (!is_written) continue;
        tensor.param.data()[i] = static_cast<TestType>(3.0f + static_cast<float>(i % 7));
        expected.back()[i] = static_cast<float>(tensor.param.data()[i]);
      }
    }
    step_on_host(tensors, options, signals_with_lr(0));
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (int64_t i = 0; i < tensors[t].size; ++i) {
        REQUIRE(bits(tensors[t].master.data()[i]) == bits(expected[t][i]));
        REQUIRE(tensors[t].param.data()[i].x == static_cast<TestType>(expected[t][i]).x);
      }
    }
  });
}

TEST_CASE("adopt_params does not change the step of parameters that were not written") {
  using Types = AdamTypes<BFloat16, BFloat16, float, Master::kFloat, false>;
  AdamOptions options = adamw_options();
  std::vector<std::string> results;
  for (const bool adopt : {false, true}) {
    options.adopt_params = adopt;
    auto tensors = trained<Types>(/*aggressive=*/true);  // includes NaN and infinities
    step_on_host(tensors, options, signals_with_lr(0.01));
    results.push_back(bits_of(tensors));
  }
  CHECK((results[0] == results[1]));
}

TEST_CASE("a skipped step does not adopt written parameters") {
  using Types = AdamTypes<BFloat16, BFloat16, float, Master::kFloat, false>;
  AdamOptions options = adamw_options();
  options.adopt_params = true;
  FakeAdamTensors<Types> tensors;
  tensors.push_back(random_adam_tensor<Types>(131, 0, {}, 1));
  std::fill_n(tensors[0].param.data(), 131, static_cast<BFloat16>(9.0f));
  const std::string before = bits_of(tensors);
  const float found_inf = 1;
  auto signals = signals_with_lr(0.01);
  signals.found_inf = &found_inf;
  step_on_host(tensors, options, signals);
  CHECK((bits_of(tensors) == before));
}

TEST_CASE("a bfloat16 that is not NaN and any remainder join to a number that is not NaN") {
  for (const uint16_t upper : {0x0000, 0x0001, 0x3f80, 0x7f7f, 0x7f80}) {
    INFO("upper half " << upper);
    int made = 0;
    for (const uint16_t sign : {0x0000, 0x8000}) {
      for (int remainder = -32768; remainder < 32768; ++remainder) {
        const auto bfloat16 = static_cast<uint16_t>(upper | sign);
        made += std::isnan(ampfuse::math::join_float({bfloat16, static_cast<int16_t>(remainder)}));
      }
    }
    CHECK(made == 0);
  }
}

TEST_CASE("updates below an ulp of bfloat16 add up in masters and are lost without") {
  const auto moved = []<typename Types>() {
    FakeAdamTensors<Types> tensors;
    tensors.push_back(random_adam_tensor<Types>(1, 0, {}, 1));
    tensors[0].set_number(0, 1);
    tensors[0].exp_avg.data()[0] = 0;
    tensors[0].exp_avg_sq.data()[0] = 0;
    tensors[0].grad.data()[0] = 1;
    AdamOptions options = adamw_options();
    options.weight_decay = 0;
    for (int step = 0; step < 8; ++step) step_on_host(tensors, options, signals_with_lr(1e-3));
    return 1 - tensors[0].number(0);
  };
  // Each step is 1e-3, and an ulp of bfloat16 is 4e-3 here.
  using Alone = AdamTypes<BFloat16, BFloat16, float, Master::kNone, false>;
  using Masters = AdamTypes<BFloat16, BFloat16, float, Master::kFloat, false>;
  using Remainders = AdamTypes<uint16_t, BFloat16, float, Master::kRemainder, false>;
  CHECK(moved.operator()<Alone>() == 0);
  CHECK(moved.operator()<Masters>() == Approx(0.008).epsilon(1e-3));
  CHECK(moved.operator()<Remainders>() == Approx(0.008).epsilon(1e-3));
}

TEST_CASE("joining a split float restores it, except that NaNs become quiet") {
  for (const uint16_t edge : kEdges) {
    INFO("upper half " << edge);
    CHECK(failures(edge, [](float x, SplitFloat split) {
            const uint32_t quiet = std::isnan(x) ? 0x00400000 : 0;
            return bits(ampfuse::math::join_float(split)) == (bits(x) | quiet);
          }) == 0);
  }
}

TEST_CASE("splitting a joined float gives the same bfloat16 and remainder") {
  for (const uint16_t edge : kEdges) {
    INFO("upper half " << edge);
    CHECK(failures(edge, [](float, SplitFloat split) {
            const SplitFloat again = ampfuse::math::split_float(ampfuse::math::join_float(split));
            return again.bfloat16 == split.bfloat16 && again.remainder == split.remainder;
          }) == 0);
  }
}

TEST_CASE("the split bfloat16 is the nearest, and the larger in magnitude of a tie") {
  for (const uint16_t edge : kEdges) {
    INFO("upper half " << edge);
    CHECK(failures(edge, [](float x, SplitFloat split) {
            const float half = as_bfloat16(split.bfloat16);
            const float nearest = static_cast<float>(static_cast<BFloat16>(x));  // ties to even
            if (std::isnan(x)) return std::isnan(half);
            if (bits(half) == bits(nearest)) {
              // If x is a tie, the other neighbour must not be larger in magnitude.
              return (bits(x) & 0xffff) != 0x8000 || std::fabs(half) > std::fabs(x);
            }
            return std::fabs(double{half} - x) == std::fabs(double{nearest} - x) &&
                   std::fabs(half) > std::fabs(nearest);
          }) == 0);
  }
}

TEST_CASE("the largest float splits into infinity and a remainder that restores it") {
  const float largest = std::numeric_limits<float>::max();
  const SplitFloat split = ampfuse::math::split_float(largest);
  CHECK(as_bfloat16(split.bfloat16) == std::numeric_limits<float>::infinity());
  CHECK(split.remainder == -1);
  CHECK(ampfuse::math::join_float(split) == largest);
}

TEST_CASE("a NaN with all its payload in the lower bits splits into a NaN") {
  const SplitFloat split = ampfuse::math::split_float(from_bits(0xff800001));
  CHECK(std::isnan(as_bfloat16(split.bfloat16)));
  CHECK(bits(ampfuse::math::join_float(split)) == 0xffc00001);
}
