// Damaged archives: loading one applies all of it or nothing.

#include <ampfuse/optim.h>

#include <map>
#include <random>
#include <sstream>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;
using ampfuse::MasterWeights;
using torch::serialize::OutputArchive;
using Entries = std::map<std::string, torch::IValue>;

// The contents of an archive with one group.
struct Content {
  std::vector<Entries> states;
  Entries options;
};

torch::Tensor number(size_t value) {
  return torch::tensor(static_cast<int64_t>(value));
}

OutputArchive archive_of(const OutputArchive& parent, const Entries& entries) {
  OutputArchive archive(parent.compilation_unit());
  for (const auto& [name, value] : entries) archive.write(name, value);
  return archive;
}

std::string archived(const Content& content) {
  OutputArchive archive;
  OutputArchive states(archive.compilation_unit());
  OutputArchive group(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  group.write("params/size", number(content.states.size()));
  for (size_t i = 0; i < content.states.size(); ++i) {
    group.write("params/" + std::to_string(i), torch::IValue(std::to_string(i)));
    OutputArchive state = archive_of(archive, content.states[i]);
    states.write(std::to_string(i), state);
  }
  OutputArchive options = archive_of(archive, content.options);
  group.write("options", options);
  groups.write("param_groups/size", number(1));
  groups.write("param_groups/0", group);
  archive.write("pytorch_version", torch::IValue("1.5.0"));
  archive.write("state", states);
  archive.write("param_groups", groups);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

Content content_of(ampfuse::AdamW& optimizer, const Tensors& params) {
  Content content;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& state = state_of(optimizer, params[i]);
    Entries entries = {{"step", state.step().item<int64_t>()},
                       {"exp_avg", state.exp_avg()},
                       {"exp_avg_sq", state.exp_avg_sq()}};
    if (state.master_param().defined()) {
      entries["master_param"] = optimizer.master_params()[i];
    }
    content.states.push_back(entries);
  }
  content.options = {{"lr", 0.5}, {"betas", std::tuple(0.9, 0.99)}, {"eps", 1e-8}};
  return content;
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

using Options = std::tuple<double, std::tuple<double, double>, double, double, bool, bool,
                           MasterWeights, at::ScalarType, std::optional<double>, bool>;

Options options_of(ampfuse::AdamW& optimizer) {
  const auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
  return {options.lr(),
          options.betas(),
          options.eps(),
          options.weight_decay(),
          options.amsgrad(),
          options.maximize(),
          options.master_weights(),
          options.state_dtype(),
          options.max_grad_norm(),
          options.write_back_grads()};
}

// All parameters, state and options that loading may change, as they are at construction.
struct Picture {
  Picture(ampfuse::AdamW& optimizer, const Tensors& params) : options(options_of(optimizer)) {
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

  Options options;
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
  const Content good = content_of(optimizer, params);
  std::minstd_rand random(1);
  const auto one_of = [&random](size_t count) { return random() % count; };
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    Content content = good;
    for (size_t changes = 1 + one_of(3); changes > 0; --changes) {
      const size_t index = one_of(content.states.size() + 1);
      Entries& entries = index < content.states.size() ? content.states[index] : content.options;
      if (entries.empty()) continue;
      const auto entry = std::next(entries.begin(), one_of(entries.size()));
      const size_t kind = one_of(junk().size() + 1);
      if (kind == junk().size()) {
        entries.erase(entry);
      } else {
        entry->second = junk()[kind];
      }
    }
    const Picture before(optimizer, params);
    std::istringstream stream(archived(content));
    try {
      torch::load(optimizer, stream);
      train(optimizer, params, 3, 3);
    } catch (const std::exception&) {
      ++refused;
      REQUIRE(Picture(optimizer, params).is_same(before));
    }
  }
  CHECK(refused > 100);
  std::istringstream stream(archived(good));
  torch::load(optimizer, stream);
  train(optimizer, params, 3, 4);
}
