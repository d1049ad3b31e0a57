// Values that the fused_adam kernels compute, and the packs that they use. The rest is tested in
// test_fused_adam_signals.cpp, _masters.cpp and _tables.cpp.
#include "simt/simt.h"

#include <tuple>

#include "adam_on_host.h"
#include "adam_reference.h"
#include "catch.h"

using ampfuse::AdamTypes;
using ampfuse::Master;
using ampfuse::math::AdamOptions;
using BFloat16 = c10::BFloat16;
using Half = c10::Half;

namespace {

template <typename Types>
void check_against_reference(AdamOptions options) {
  options.amsgrad = Types::kAmsgrad;
  const auto before = adam_boundary_tensors<Types>();
  auto tensors = adam_boundary_tensors<Types>();
  const float grad_scale = 3;
  ampfuse::AdamSignals signals = signals_with_lr(0.01);
  signals.grad_scale = &grad_scale;
  step_on_host(tensors, options, signals);
  CHECK(misses(before, tensors, options, 0.01, 1.0 / 3) == Misses{});
  bool counted = true;
  for (size_t t = 0; t < tensors.size(); ++t) {
    counted = counted && tensors[t].steps_taken == before[t].steps_taken + 1;
  }
  CHECK(counted);
}

// Every type in every column at least once, with and without amsgrad.
using AllTypes = std::tuple<AdamTypes<float, float, float, Master::kNone, false>,
                            AdamTypes<float, Half, BFloat16, Master::kNone, true>,
                            AdamTypes<Half, Half, float, Master::kNone, false>,
                            AdamTypes<BFloat16, float, float, Master::kNone, true>,
                            AdamTypes<BFloat16, Half, float, Master::kFloat, false>,
                            AdamTypes<Half, BFloat16, float, Master::kFloat, true>,
                            AdamTypes<uint16_t, BFloat16, BFloat16, Master::kRemainder, false>,
                            AdamTypes<uint16_t, BFloat16, float, Master::kRemainder, true>,
                            AdamTypes<double, double, double, Master::kNone, false>,
                            AdamTypes<double, double, double, Master::kNone, true>>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("a step of AdamW matches the reference within roundings", "", AllTypes) {
  simt::for_each_schedule([] { check_against_reference<TestType>(adamw_options()); });
}

TEMPLATE_LIST_TEST_CASE("a maximising step of Adam with small betas matches the reference", "",
                        AllTypes) {
  AdamOptions options = adamw_options();
  options.decoupled = false;
  options.maximize = true;
  options.beta1 = 0.1;  // exp_avg is then interpolated starting from the gradient
  options.beta2 = 0.25;
  options.eps = 0.1;  // no longer negligible beside √v
  simt::for_each_schedule([&options] { check_against_reference<TestType>(options); });
}

TEMPLATE_TEST_CASE("packs and single elements give the same bits", "",
                   (AdamTypes<float, float, float, Master::kNone, false>),
                   (AdamTypes<float, Half, float, Master::kNone, true>),
                   (AdamTypes<BFloat16, Half, float, Master::kFloat, true>),
                   (AdamTypes<uint16_t, BFloat16, BFloat16, Master::kRemainder, false>)) {
  AdamOptions options = adamw_options();
  options.write_back_grads = true;
  auto aligned = adam_boundary_tensors<TestType>();
  step_on_host(aligned, options, signals_with_lr(0.01));
  for (int column = 0; column < ampfuse::math::kAdamColumns; ++column) {
    INFO("misaligned column " << column);
    AdamOffsets offsets = {};
    offsets[column] = 1;
    auto misaligned = adam_boundary_tensors<TestType>(offsets);
    step_on_host(misaligned, options, signals_with_lr(0.01));
    CHECK((bits_of(misaligned) == bits_of(aligned)));
  }
}

TEST_CASE("a chunk is processed in packs only if all its columns are aligned") {
  using Types = AdamTypes<BFloat16, Half, float, Master::kFloat, false>;
  const auto lots_from = [](const AdamOffsets& offsets) {
    const auto tensor = random_adam_tensor<Types>(100, 0, offsets, 1);
    return ampfuse::adam_chunk_is_aligned<Types>({tensor.param.data(), tensor.grad.data(),
                                                  tensor.exp_avg.data(), tensor.exp_avg_sq.data(),
                                                  nullptr, tensor.master.data()});
  };
  CHECK(lots_from({0, 0, 0, 0, 0, 0}));
  CHECK(lots_from({4, 8, 4, 8, 0, 4}));  // packs have four elements
  CHECK_FALSE(lots_from({1, 0, 0, 0, 0, 0}));
  CHECK_FALSE(lots_from({0, 2, 0, 0, 0, 0}));
  CHECK_FALSE(lots_from({0, 0, 3, 0, 0, 0}));
  CHECK_FALSE(lots_from({0, 0, 0, 2, 0, 0}));
  CHECK_FALSE(lots_from({0, 0, 0, 0, 0, 1}));
}
