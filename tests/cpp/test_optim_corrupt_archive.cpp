// Damaged archives: loading one applies all of it or nothing.

#include <ampfuse/optim.h>

#include <functional>
#include <random>
#include <set>
#include <sstream>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;
using ampfuse::MasterWeights;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Copies entries. `change` may replace a value, or return false to leave it out.
void copy(InputArchive& from, OutputArchive& to,
          const std::function<bool(torch::IValue&)>& change) {
  for (const std::string& key : from.keys()) {
    InputArchive part;
    torch::IValue value;
    if (from.try_read(key, part)) {
      OutputArchive copied(to.compilation_unit());
      copy(part, copied, change);
      to.write(key, copied);
    } else {
      from.read(key, value);
      if (change(value)) to.write(key, value);
    }
  }
}

std::vector<torch::IValue> junk() {
  return {"a word",
          3,
          0.25,
          -1.0,
          NAN,
          true,
          torch::ones({7, 3}),
          torch::ones({0}),
          torch::ones({33, 5}, torch::kLong),
          torch::ones({33, 5}, torch::kBool),
          torch::ones({33, 5}, torch::kComplexFloat),
          torch::ones({33, 5}).to_sparse(),
          torch::ones({33, 5}),
          std::tuple(0.5, 1.5),
          c10::List<double>({1.0, 2.0})};
}

std::string archived_options(ampfuse::AdamW& optimizer) {
  OutputArchive archive;
  optimizer.param_groups()[0].options().serialize(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

// All parameters, state and options that loading may change, as they are at construction.
struct Picture {
  Picture(ampfuse::AdamW& optimizer, const Tensors& params) : options(archived_options(optimizer)) {
    for (const auto& param : params) {
      const auto& state = state_of(optimizer, param);
      for (const auto& tensor : {param, state.step(), state.exp_avg(), state.exp_avg_sq(),
                                 state.max_exp_avg_sq(), state.master_param()}) {
        tensors.push_back(tensor);
        values.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
      }
    }
  }

  bool is_same(const Picture& other) const {
    bool same = options == other.options;
    for (size_t i = 0; i < tensors.size(); ++i) {
      same = same && tensors[i].is_same(other.tensors[i]) &&
             (!values[i].defined() || same_bits(values[i], other.values[i]));
    }
    return same;
  }

  std::string options;
  Tensors tensors;
  Tensors values;
};

}  // namespace

TEST_CASE("a damaged archive that is refused changes nothing in the optimizer") {
  const auto [dtype, options] = GENERATE(
      std::tuple(torch::kFloat, AdamWOptions()), std::tuple(torch::kHalf, AdamWOptions()),
      std::tuple(torch::kFloat, AdamWOptions().amsgrad(true)),
      std::tuple(torch::kBFloat16, AdamWOptions().master_weights(MasterWeights::kRemainder)),
      std::tuple(torch::kBFloat16, AdamWOptions().state_dtype(torch::kBFloat16)));
  const auto params = parameters(torch::kCPU, dtype);
  ampfuse::AdamW optimizer(params, options);
  train(optimizer, params, 1, 2);
  std::stringstream good;
  torch::save(optimizer, good);
  std::minstd_rand random(1);
  const auto one_of = [&random](size_t count) { return random() % count; };
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    InputArchive content;
    content.load_from(good);
    good.seekg(0);
    size_t entries = 0;
    OutputArchive counted;
    copy(content, counted, [&](torch::IValue&) { return ++entries > 0; });
    std::set<size_t> changed;
    for (size_t changes = 1 + one_of(3); changes > 0; --changes) changed.insert(one_of(entries));
    OutputArchive damaged;
    copy(content, damaged, [&](torch::IValue& value) {
      if (changed.count(--entries) == 0) return true;
      const size_t kind = one_of(junk().size() + 1);
      if (kind == junk().size()) return false;
      value = junk()[kind];
      return true;
    });
    std::stringstream stream;
    damaged.save_to(stream);
    const Picture before(optimizer, params);
    try {
      torch::load(optimizer, stream);
      train(optimizer, params, 3, 3);
    } catch (const std::exception&) {
      ++refused;
      REQUIRE(Picture(optimizer, params).is_same(before));
    }
  }
  CHECK(refused > 100);
  torch::load(optimizer, good);
  train(optimizer, params, 3, 4);
}
