// Lists that take several launches, and tensors that are too large to allocate here.
#include "simt/simt.h"

#include <algorithm>

#include "adam_on_host.h"
#include "adam_reference.h"
#include "catch.h"

using ampfuse::AdamTable;
using ampfuse::AdamTypes;
using ampfuse::Master;
using ampfuse::StepTable;
using ampfuse::TableChunk;

namespace {

using Plain = AdamTypes<float, float, float, Master::kNone, false>;
using Mixed = AdamTypes<c10::BFloat16, c10::BFloat16, float, Master::kFloat, false>;

// Returns tensors of one to three elements with step counts `first_count`, `first_count` + 1, ….
template <typename Types>
FakeAdamTensors<Types> many_tensors(int count, int first_count) {
  FakeAdamTensors<Types> tensors;
  for (int t = 0; t < count; ++t) {
    const auto steps_taken = static_cast<float>(first_count + t);
    tensors.push_back(random_adam_tensor<Types>(1 + t % 3, steps_taken, {}, t));
  }
  return tensors;
}

// Returns true if each tensor took the step of its own step count.
template <typename Types>
bool all_stepped(const FakeAdamTensors<Types>& before, const FakeAdamTensors<Types>& after) {
  return misses(before, after, adamw_options(), 0.01, 1) == Misses{};
}

template <typename Types>
void append_counters(FakeAdamTensors<Types>& tensors, std::vector<float*>& counters) {
  for (float* const counter : counters_of(tensors)) counters.push_back(counter);
}

}  // namespace

TEST_CASE("tables of 600 tensors and of 2300 counters fit in kernel arguments") {
  STATIC_REQUIRE(AdamTable::kCapacity >= 600);
  STATIC_REQUIRE(StepTable::kCapacity >= 2300);
  STATIC_REQUIRE(sizeof(AdamTable) + ampfuse::kOtherArgumentBytes <= ampfuse::kMaxArgumentBytes);
  STATIC_REQUIRE(sizeof(StepTable) + ampfuse::kOtherArgumentBytes <= ampfuse::kMaxArgumentBytes);
  STATIC_REQUIRE(sizeof(ampfuse::AdamSignals) + sizeof(ampfuse::math::AdamOptions) +
                     sizeof(ampfuse::AdamPlan<float>) + sizeof(int64_t) <=
                 ampfuse::kOtherArgumentBytes);
}

TEST_CASE("a list that fits in one table takes two launches") {
  auto tensors = adam_boundary_tensors<Plain>();
  CHECK(step_on_host(tensors, adamw_options(), signals_with_lr(0.01)) == 2);
}

TEST_CASE("a list without tensors takes no launch") {
  FakeAdamTensors<Plain> tensors;
  CHECK(step_on_host(tensors, adamw_options(), signals_with_lr(0.01)) == 0);
}

TEST_CASE("all tensors of a list longer than a table step by their own counts") {
  const int count = AdamTable::kCapacity + 5;
  auto tensors = many_tensors<Plain>(count, 0);
  CHECK(step_on_host(tensors, adamw_options(), signals_with_lr(0.01)) == 3);
  CHECK(all_stepped(many_tensors<Plain>(count, 0), tensors));
}

TEST_CASE("all counters of a list longer than a table are incremented once") {
  simt::for_each_schedule([] {
    std::vector<float> counts(StepTable::kCapacity + 5);
    for (size_t t = 0; t < counts.size(); ++t) counts[t] = static_cast<float>(t % 100);
    std::vector<float*> counters;
    for (float& count : counts) counters.push_back(&count);
    HostPlan<float> plan(counts.size());
    CHECK(prepare_on_host(counters, adamw_options(), signals_with_lr(0.01), plan) == 2);
    for (size_t t = 0; t < counts.size(); ++t) {
      const auto step = static_cast<double>(t % 100 + 1);
      REQUIRE(counts[t] == step);
      // The step size is 0.01·√(1−0.999ᵗ)/(1−0.9ᵗ), rounded from double to fp32.
      const double size = 0.01 * std::sqrt(1 - std::pow(0.999, step)) / (1 - std::pow(0.9, step));
      REQUIRE(plan.steps[t].size == Approx(size).epsilon(0x1p-23));
      REQUIRE(plan.steps[t].decay == 0.001f);
    }
  });
}

TEST_CASE("updates of two types share one launch of the prepare kernel") {
  simt::for_each_schedule([] {
    auto plain = many_tensors<Plain>(7, 0);
    auto mixed = many_tensors<Mixed>(5, 20);
    std::vector<float*> counters;
    append_counters(plain, counters);
    append_counters(mixed, counters);
    HostPlan<float> plan(counters.size());
    CHECK(prepare_on_host(counters, adamw_options(), signals_with_lr(0.01), plan) == 1);
    CHECK(update_on_host(plain, adamw_options(), 0, plan) == 1);
    CHECK(update_on_host(mixed, adamw_options(), 7, plan) == 1);
    CHECK(all_stepped(many_tensors<Plain>(7, 0), plain));
    CHECK(all_stepped(many_tensors<Mixed>(5, 20), mixed));
  });
}

TEST_CASE("tensors of a second type beyond a table step by their own counts") {
  const int count = AdamTable::kCapacity + 5;
  auto plain = many_tensors<Plain>(3, 0);
  auto mixed = many_tensors<Mixed>(count, 20);
  std::vector<float*> counters;
  append_counters(plain, counters);
  append_counters(mixed, counters);
  HostPlan<float> plan(counters.size());
  prepare_on_host(counters, adamw_options(), signals_with_lr(0.01), plan);
  update_on_host(plain, adamw_options(), 0, plan);
  CHECK(update_on_host(mixed, adamw_options(), 3, plan) == 2);
  CHECK(all_stepped(many_tensors<Mixed>(count, 20), mixed));
}

TEST_CASE("elements beyond 2^31 are found in every column") {
  using Types = AdamTypes<c10::BFloat16, c10::Half, float, Master::kFloat, true>;
  const int64_t size = (int64_t{1} << 33) + 5;
  // Columns begin at these addresses, which are never read.
  const uintptr_t base = uintptr_t{1} << 44;
  const auto column = [base](int number) {
    return reinterpret_cast<void*>(base + (uintptr_t{1} << 36) * number);
  };
  const auto at_element = [base](const auto* data, int column) {
    const uintptr_t bytes =
        reinterpret_cast<uintptr_t>(data) - base - (uintptr_t{1} << 36) * column;
    return static_cast<int64_t>(bytes / sizeof(*data));
  };
  const int64_t element = GENERATE(int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 33);
  int launches = 0;
  auto builder = ampfuse::build_tables<AdamTable>([&](const AdamTable& table) {
    const auto number = static_cast<uint32_t>(element / AdamTable::kChunk);
    const TableChunk at = ampfuse::find_chunk(table, /*chunk=*/1 + number);
    CHECK(at.tensor == 1);
    CHECK(at.number == number);
    CHECK(at.size == std::min<int64_t>(AdamTable::kChunk, size - element));
    const ampfuse::AdamChunk<Types> chunk = ampfuse::adam_chunk<Types>(table, at);
    CHECK(at_element(chunk.param, ampfuse::math::kParam) == element);
    CHECK(at_element(chunk.grad, ampfuse::math::kGrad) == element);
    CHECK(at_element(chunk.exp_avg, ampfuse::math::kExpAvg) == element);
    CHECK(at_element(chunk.exp_avg_sq, ampfuse::math::kExpAvgSq) == element);
    CHECK(at_element(chunk.max_exp_avg_sq, ampfuse::math::kMaxExpAvgSq) == element);
    CHECK(at_element(chunk.master, ampfuse::math::kMaster) == element);
    ++launches;
  });
  builder.add({column(0), column(1), column(2), column(3), column(4), column(5)}, 7);
  builder.add({column(0), column(1), column(2), column(3), column(4), column(5)}, size);
  builder.flush();
  CHECK(launches == 1);
}
