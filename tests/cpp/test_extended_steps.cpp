// The CPU's steps with moments in 8 bits, random rounding and averages have the bits of their
// definition. Those of the CUDA kernels are tested in tests/cuda_host.
#include <ampfuse/fused_adam.h>
#include <ampfuse/fused_sgd.h>

#include "extended_reference.h"
#include "torch_catch.h"

namespace {

constexpr int64_t kSeed = 77;

std::vector<float> floats_of(const torch::Tensor& tensor) {
  const auto floats = tensor.to(torch::kFloat).contiguous();
  return {floats.data_ptr<float>(), floats.data_ptr<float>() + floats.numel()};
}

std::vector<int> ints_of(const torch::Tensor& tensor) {
  const auto ints = tensor.to(torch::kInt).contiguous();
  return {ints.data_ptr<int>(), ints.data_ptr<int>() + ints.numel()};
}

reference::Codes codes_of(const torch::Tensor& codes, const torch::Tensor& units) {
  const auto bits = units.view(torch::kShort).contiguous();
  const auto* const first = reinterpret_cast<const uint16_t*>(bits.data_ptr<int16_t>());
  return {codes.scalar_type() == torch::kChar, ints_of(codes), {first, first + bits.numel()}};
}

// A parameter of bfloat16 with 8-bit moments, and what it needs besides.
struct Coded {
  torch::Tensor param;
  torch::Tensor grad;
  torch::Tensor codes[2];
  torch::Tensor units[2];
  torch::Tensor step;
  torch::Tensor average;

  Coded(int64_t size, double count, torch::Dtype ema_dtype) {
    const auto floats = torch::TensorOptions().dtype(torch::kFloat);
    param = torch::randn({size}, floats).to(torch::kBFloat16);
    grad = torch::randn({size}, floats).to(torch::kBFloat16);
    codes[0] = torch::randint(-127, 128, {size}, torch::kChar);
    codes[1] = torch::randint(0, 256, {size}, torch::kByte);
    for (auto& of_moment : units) {
      of_moment = torch::rand({(size + 31) / 32}, floats).mul(1e-3).to(torch::kBFloat16);
    }
    step = torch::full({}, count, floats);
    average = torch::randn({size}, floats).to(ema_dtype);
  }

  void take_step(int64_t first_index) {
    const std::vector<torch::Tensor> all_units = {units[0], units[1]};
    const std::vector<int64_t> indices = {first_index};
    ampfuse::FusedAdamOptions options = {.lr = torch::full({}, 0.01, torch::kDouble)};
    options.ema_decay = 0.75;
    options.round_at_random = true;
    options.seed = kSeed;
    options.first_indices = indices;
    ampfuse::fused_adam({param, grad, codes[0], codes[1], {}, step, {}, all_units, average},
                        options);
  }
};

}  // namespace

TEST_CASE("an extended step on the CPU has the bits of its definition", "[vectorised]") {
  torch::manual_seed(0);
  for (const int64_t size : {0, 1, 31, 32, 33, 255, 256, 257, 1000, 9000}) {
    for (const int64_t first_index : {0, 8, 13}) {
      for (const double count : {0, 7}) {
        for (const auto ema_dtype : {torch::kFloat, torch::kBFloat16}) {
          CAPTURE(size, first_index, count);
          Coded x(size, count, ema_dtype);
          reference::Codes codes[] = {codes_of(x.codes[0], x.units[0]),
                                      codes_of(x.codes[1], x.units[1])};
          // The same step with fp32 moments and an fp32 parameter.
          const auto number = x.param.to(torch::kFloat);
          torch::Tensor moments[2];
          for (int m = 0; m < 2; ++m) {
            std::vector<float> decoded;
            for (int64_t i = 0; i < size; ++i) decoded.push_back(codes[m].decoded(i));
            moments[m] = torch::tensor(decoded, torch::kFloat);
          }
          const auto old = floats_of(x.average);
          ampfuse::fused_adam(
              {number, x.grad.clone(), moments[0], moments[1], {}, x.step.clone(), {}},
              {.lr = torch::full({}, 0.01, torch::kDouble)});
          x.take_step(first_index);

          const auto step = static_cast<uint32_t>(count + 1);
          const auto random = [&](size_t i) {
            return reference::random_of(kSeed, step, first_index + static_cast<int64_t>(i));
          };
          for (int m = 0; m < 2; ++m) {
            codes[m].encode(floats_of(moments[m]), [&](size_t i) {
              return reference::thirteen_bits(random(i), m == 0 ? 0x6255 : 0xA3D9);
            });
            CHECK(ints_of(x.codes[m]) == codes[m].codes);
            CHECK(codes_of(x.codes[m], x.units[m]).units == codes[m].units);
          }
          const auto numbers = floats_of(number);
          const auto params = floats_of(x.param);
          const auto averages = floats_of(x.average);
          int misses = 0;
          for (size_t i = 0; i < numbers.size(); ++i) {
            misses += params[i] != reference::round_to_bfloat16(numbers[i], random(i));
            float average = step == 1 ? numbers[i] : std::fma(0.25f, numbers[i] - old[i], old[i]);
            if (ema_dtype == torch::kBFloat16) {
              average = reference::round_to_bfloat16(average, random(i) * 0x9E37 & 0xffff);
            }
            misses += averages[i] != average;
          }
          CHECK(misses == 0);
        }
      }
    }
  }
}

TEST_CASE("the random numbers are those of Philox") {
  // Published results of Random123 for counters and keys of zeros, with 7 and with 10 rounds.
  using Words = std::array<uint32_t, 4>;
  CHECK(reference::philox({}, {}, 7) == Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  CHECK(reference::philox({}, {}, 10) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
}
