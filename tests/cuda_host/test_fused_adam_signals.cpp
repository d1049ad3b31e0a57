// Signals that only the device knows when a step begins, and extreme values of options.
#include "simt/simt.h"

#include <algorithm>
#include <cstring>

#include "adam_on_host.h"
#include "catch.h"

using ampfuse::AdamSignals;
using ampfuse::AdamTypes;
using ampfuse::Master;
using ampfuse::math::AdamOptions;

namespace {

using Types = AdamTypes<float, float, float, Master::kNone, false>;
using MixedTypes = AdamTypes<c10::BFloat16, c10::Half, float, Master::kFloat, true>;
using Tensors = FakeAdamTensors<Types>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Returns tensors with few elements, but with more than a pack per lane and a tail.
template <typename T = Types>
FakeAdamTensors<T> small_tensors(float steps_taken = 3) {
  FakeAdamTensors<T> tensors;
  uint32_t seed = 0;
  for (const int64_t size : {0, 1, 131}) {
    tensors.push_back(random_adam_tensor<T>(size, steps_taken, {}, seed++));
  }
  return tensors;
}

// Returns a tensor before its first step, with zero moments.
FakeAdamTensor<Types> fresh_tensor(std::initializer_list<float> params,
                                   std::initializer_list<float> grads) {
  FakeAdamTensor<Types> tensor(static_cast<int64_t>(params.size()), 0, {});
  std::copy(params.begin(), params.end(), tensor.param.data());
  std::copy(grads.begin(), grads.end(), tensor.grad.data());
  std::fill_n(tensor.exp_avg.data(), tensor.size, 0.0f);
  std::fill_n(tensor.exp_avg_sq.data(), tensor.size, 0.0f);
  return tensor;
}

Tensors list_of(FakeAdamTensor<Types> tensor) {
  Tensors tensors;
  tensors.push_back(std::move(tensor));
  return tensors;
}

template <typename T = Types>
std::string bits_after_step(const AdamOptions& options, const AdamSignals& signals) {
  auto tensors = small_tensors<T>();
  step_on_host(tensors, options, signals);
  return bits_of(tensors);
}

// Signals that clip an unscaled norm of 8 to 2; total_norm is the norm of gradients scaled by 16.
struct Clipping {
  float grad_scale = 16;
  float total_norm = 8 * 16;
  float grad_norm = -1;

  AdamSignals signals() {
    AdamSignals signals = signals_with_lr(0.01);
    signals.grad_scale = &grad_scale;
    signals.total_norm = {&total_norm, false, 0};
    signals.clip = true;
    signals.max_norm = 2;
    signals.grad_norm = &grad_norm;
    return signals;
  }
};

}  // namespace

TEST_CASE("any found_inf except 0 skips the step but grad_norm is still reported") {
  const float found_inf = GENERATE(1.0f, 2.0f, 3.0f, -1.0f, kNan);
  AdamOptions options = adamw_options();
  options.amsgrad = true;
  options.write_back_grads = true;
  simt::for_each_schedule([&] {
    auto tensors = small_tensors<MixedTypes>();
    Clipping clipping;
    AdamSignals signals = clipping.signals();
    signals.found_inf = &found_inf;
    step_on_host(tensors, options, signals);
    CHECK((bits_of(tensors) == bits_of(small_tensors<MixedTypes>())));
    CHECK(clipping.grad_norm == 8);
  });
}

TEST_CASE("a step is skipped when the inverse of the loss scale is not a finite float") {
  const float scale = GENERATE(0.0f, 0x1p-149f, 0x1p-128f, kNan);
  simt::for_each_schedule([&] {
    auto tensors = small_tensors<MixedTypes>();
    AdamSignals signals = signals_with_lr(0.01);
    signals.grad_scale = &scale;
    step_on_host(tensors, adamw_options(), signals);
    CHECK((bits_of(tensors) == bits_of(small_tensors<MixedTypes>())));
  });
}

TEST_CASE("the smallest loss scale with a finite inverse does not skip the step") {
  const float scale = std::nextafter(0x1p-128f, 1.0f);
  auto tensors = small_tensors();
  AdamSignals signals = signals_with_lr(0.01);
  signals.grad_scale = &scale;
  step_on_host(tensors, adamw_options(), signals);
  CHECK(tensors[2].steps_taken == 4);
  CHECK(std::isfinite(tensors[2].param.data()[0]));
}

TEST_CASE("the step after a skipped first step counts as the first") {
  simt::for_each_schedule([] {
    auto tensors = small_tensors(/*steps_taken=*/0);
    auto never_skipped = small_tensors(/*steps_taken=*/0);
    float found_inf = 1;
    AdamSignals signals = signals_with_lr(0.01);
    signals.found_inf = &found_inf;
    step_on_host(tensors, adamw_options(), signals);
    CHECK(tensors[0].steps_taken == 0);
    found_inf = 0;
    step_on_host(tensors, adamw_options(), signals);
    CHECK(tensors[0].steps_taken == 1);  // this tensor has no elements
    CHECK(tensors[2].steps_taken == 1);
    step_on_host(never_skipped, adamw_options(), signals_with_lr(0.01));
    CHECK((bits_of(tensors) == bits_of(never_skipped)));
  });
}

TEST_CASE("gradients scaled by a power of two give the bits of unscaled ones") {
  auto tensors = small_tensors();
  for (auto& tensor : tensors) {
    for (int64_t i = 0; i < tensor.size; ++i) tensor.grad.data()[i] *= 65536;
  }
  const float grad_scale = 65536;
  AdamSignals signals = signals_with_lr(0.01);
  signals.grad_scale = &grad_scale;
  AdamOptions options = adamw_options();
  options.write_back_grads = true;  // so that the gradients have the same bits again
  step_on_host(tensors, options, signals);
  CHECK((bits_of(tensors) == bits_after_step(options, signals_with_lr(0.01))));
}

TEST_CASE("gradients are unscaled and clipped by one factor and written back") {
  auto tensors = small_tensors<MixedTypes>();
  const auto before = small_tensors<MixedTypes>();
  AdamOptions options = adamw_options();
  options.amsgrad = true;
  options.write_back_grads = true;
  Clipping clipping;
  step_on_host(tensors, options, clipping.signals());
  CHECK(clipping.grad_norm == 8);
  const auto factor = static_cast<float>(2.0 / (8.0 + 1e-6) / 16);
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t i = 0; i < tensors[t].size; ++i) {
      const float unscaled = static_cast<float>(before[t].grad.data()[i]) * factor;
      REQUIRE(tensors[t].grad.data()[i] == static_cast<c10::Half>(unscaled));
    }
  }
}

TEST_CASE("a clipping step equals a step with clipped gradients") {
  auto tensors = small_tensors();
  auto clipped_before = small_tensors();
  const auto factor = static_cast<float>(2.0 / (8.0 + 1e-6) / 16);
  for (auto& tensor : clipped_before) {
    for (int64_t i = 0; i < tensor.size; ++i) tensor.grad.data()[i] *= factor;
  }
  AdamOptions options = adamw_options();
  options.write_back_grads = true;
  Clipping clipping;
  step_on_host(tensors, options, clipping.signals());
  step_on_host(clipped_before, options, signals_with_lr(0.01));
  CHECK((bits_of(tensors) == bits_of(clipped_before)));
}

TEST_CASE("gradients keep their bits without write_back_grads, even NaN payloads") {
  simt::for_each_schedule([] {
    auto tensors = small_tensors();
    const uint32_t signalling = 0x7fa12345;
    std::memcpy(tensors[2].grad.data() + 3, &signalling, sizeof signalling);
    std::vector<std::string> before;
    const auto bits = [](const FakeTensor<float>& grad) {
      return std::string(reinterpret_cast<const char*>(grad.data()), grad.size * sizeof(float));
    };
    for (const auto& tensor : tensors) before.push_back(bits(tensor.grad));
    Clipping clipping;
    step_on_host(tensors, adamw_options(), clipping.signals());
    for (size_t t = 0; t < tensors.size(); ++t) CHECK((bits(tensors[t].grad) == before[t]));
  });
}

TEST_CASE("gradients are not clipped if their norm is within the limit") {
  Clipping clipping;
  AdamSignals limited = clipping.signals();
  limited.max_norm = 9;
  AdamSignals unlimited = signals_with_lr(0.01);
  unlimited.grad_scale = &clipping.grad_scale;
  CHECK((bits_after_step(adamw_options(), limited) == bits_after_step(adamw_options(), unlimited)));
}

TEST_CASE("a NaN norm makes parameters NaN, as in torch") {
  auto tensors = small_tensors();
  Clipping clipping;
  clipping.total_norm = kNan;
  step_on_host(tensors, adamw_options(), clipping.signals());
  CHECK(std::isnan(clipping.grad_norm));
  CHECK(std::isnan(tensors[1].param.data()[0]));
  CHECK(std::isnan(tensors[2].param.data()[130]));
}

TEST_CASE("scalars may be floats or doubles on the device, or host values") {
  const double lr = 0.01;  // not exact in float
  const float float_lr = 0.01f;
  const auto bits = [](ampfuse::AdamScalar scalar) {
    return bits_after_step(adamw_options(), signals_with(scalar));
  };
  CHECK((bits({&lr, true, 0}) == bits({nullptr, true, lr})));
  CHECK((bits({&float_lr, false, 0}) == bits({nullptr, false, double{float_lr}})));
  const double total_norm = 8 * 16;
  Clipping clipping;
  AdamSignals in_double = clipping.signals();
  in_double.total_norm = {&total_norm, true, 0};
  CHECK((bits_after_step(adamw_options(), in_double) ==
         bits_after_step(adamw_options(), clipping.signals())));
}

TEST_CASE("a double learning rate is not rounded to float for double parameters") {
  using Doubles = AdamTypes<double, double, double, Master::kNone, false>;
  FakeAdamTensors<Doubles> tensors;
  tensors.push_back(random_adam_tensor<Doubles>(1, 0, {}, 1));
  tensors[0].set_number(0, 0);
  tensors[0].exp_avg.data()[0] = 0;
  tensors[0].exp_avg_sq.data()[0] = 0;
  AdamOptions options = adamw_options();
  options.eps = 0;
  const double lr = 0.1;
  step_on_host(tensors, options, signals_with({&lr, true, 0}));
  // The first step is lr for any gradient, up to ten roundings. 0.1f has a relative error of 1e-8.
  CHECK(std::fabs(tensors[0].number(0)) == Approx(0.1).epsilon(10 * 0x1p-53));
}

TEST_CASE("maximising equals minimising with the negated gradient") {
  auto tensors = small_tensors();
  auto negated = small_tensors();
  for (auto& tensor : negated) {
    for (int64_t i = 0; i < tensor.size; ++i) tensor.grad.data()[i] *= -1;
  }
  AdamOptions options = adamw_options();
  step_on_host(negated, options, signals_with_lr(0.01));
  options.maximize = true;
  step_on_host(tensors, options, signals_with_lr(0.01));
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t i = 0; i < tensors[t].size; ++i) {
      REQUIRE(tensors[t].param.data()[i] == negated[t].param.data()[i]);
      REQUIRE(tensors[t].exp_avg.data()[i] == negated[t].exp_avg.data()[i]);
    }
  }
}

TEST_CASE("weight decay of AdamW does not change the moments, but Adam's does") {
  AdamOptions options = adamw_options();
  auto decoupled = list_of(fresh_tensor({2}, {0}));
  step_on_host(decoupled, options, signals_with_lr(0.5));
  CHECK(decoupled[0].param.data()[0] == Approx(2 - 0.5 * 0.1 * 2).epsilon(1e-7));
  CHECK(decoupled[0].exp_avg.data()[0] == 0);
  options.decoupled = false;
  auto l2 = list_of(fresh_tensor({2}, {0}));
  step_on_host(l2, options, signals_with_lr(0.5));
  CHECK(l2[0].exp_avg.data()[0] == Approx(0.1 * 0.1 * 2).epsilon(1e-6));
  CHECK(l2[0].param.data()[0] == Approx(2 - 0.5).epsilon(1e-6));  // a first step is of size lr
}

TEST_CASE("a learning rate of 0 changes the state but not the parameters") {
  auto tensors = small_tensors();
  const auto before = small_tensors();
  step_on_host(tensors, adamw_options(), signals_with_lr(0));
  CHECK(tensors[2].steps_taken == 4);
  for (int64_t i = 0; i < 131; ++i) {
    REQUIRE(tensors[2].param.data()[i] == before[2].param.data()[i]);
    REQUIRE(tensors[2].exp_avg.data()[i] != before[2].exp_avg.data()[i]);
    REQUIRE(tensors[2].exp_avg_sq.data()[i] != before[2].exp_avg_sq.data()[i]);
  }
}

TEST_CASE("with betas of 0 the moments are exactly the gradient and its square") {
  AdamOptions options = adamw_options();
  options.beta1 = 0;
  options.beta2 = 0;
  options.weight_decay = 0;
  options.eps = 0;
  auto tensors = small_tensors();
  const auto before = small_tensors();
  step_on_host(tensors, options, signals_with_lr(0.25));
  for (int64_t i = 0; i < 131; ++i) {
    const float grad = before[2].grad.data()[i];
    REQUIRE(tensors[2].exp_avg.data()[i] == grad);
    REQUIRE(tensors[2].exp_avg_sq.data()[i] == grad * grad);
    // The update is lr·g/√g²: three roundings of lr and one of the result.
    const double step = grad < 0 ? -0.25 : 0.25;
    const double expected = before[2].param.data()[i] - step;
    REQUIRE(std::fabs(tensors[2].param.data()[i] - expected) <=
            0x1p-24 * (3 * 0.25 + std::fabs(expected)) * 1.001);
  }
}

TEST_CASE("eps of 0 makes only parameters with zero gradients NaN, as in torch") {
  AdamOptions options = adamw_options();
  options.eps = 0;
  auto tensors = list_of(fresh_tensor({1, 1, 1, 1, 1}, {1, 0, -1, 1, 0}));
  step_on_host(tensors, options, signals_with_lr(0.5));
  const float* params = tensors[0].param.data();
  const float decayed = 1 - 0.5f * 0.1f;
  // The margin allows for a dozen roundings of numbers up to 1.
  CHECK(params[0] == Approx(decayed - 0.5).margin(12 * 0x1p-24));
  CHECK(std::isnan(params[1]));
  CHECK(params[2] == Approx(decayed + 0.5).margin(12 * 0x1p-24));
  CHECK(params[3] == Approx(decayed - 0.5).margin(12 * 0x1p-24));
  CHECK(std::isnan(params[4]));
  CHECK(tensors[0].exp_avg.data()[1] == 0);
  CHECK(tensors[0].exp_avg_sq.data()[1] == 0);
}
