#include <ampfuse/checkpoint.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "module_part.h"
#include "optimizer_part.h"
#include "random_states.h"
#include "reader.h"
#include "run_folder.h"
#include "scaler_part.h"
#include "scheduler_part.h"

namespace ampfuse::checkpoint {

namespace {

using namespace detail;

// Returns the stored state, or nothing if each of several ranks has saved its own.
std::optional<at::IValue> part_of_one_process(const at::IValue& stored) {
  if (!stored.isGenericDict() || !stored.toGenericDict().contains("$ranks")) return stored;
  const auto ranks = stored.toGenericDict().at("$ranks").toListRef();
  return ranks.size() == 1 ? std::optional(ranks[0]) : std::nullopt;
}

// Returns the names of all parts but the random numbers.
std::set<std::string> names_of(const Dict& parts) {
  std::set<std::string> names;
  for (const auto& part : parts) names.insert(part.key().toStringRef());
  names.erase("rng");
  return names;
}

std::string names_of_parts(const Dict& parts) {
  std::set<std::string> names = names_of(parts);
  if (names.size() > 1) names.erase("values");
  return c10::Join(", ", names);
}

// Warns of what is in the checkpoint and was not asked for.
void warn_of_parts_left(const Dict& parts, const Objects& objects, const std::string& folder) {
  std::set<std::string> left = names_of(parts);
  left.erase("values");
  for (const auto& object : objects) left.erase(object.first);
  if (left.empty()) return;
  TORCH_WARN("load: ", folder, "it has ", c10::Join(", ", left), ", too, which is not loaded");
}

Mistakes mistakes_of(const Object& object, const at::IValue& part, const Index& index) {
  Mistakes mistakes;
  std::visit(
      [&](const auto& one) {
        if constexpr (requires { check_part(*one, part, index, mistakes); }) {
          check_part(*one, part, index, mistakes);
        } else {
          check_part(*one, part, mistakes);
        }
      },
      object.get());
  return mistakes;
}

// Returns the states of random numbers that are to be loaded, if there are any.
std::optional<at::IValue> random_part(const Reader& reader, std::optional<bool> rng, bool resumes) {
  if (!rng.value_or(resumes)) return std::nullopt;
  const std::string folder = reader.folder().string() + ": ";
  if (!reader.index().parts.contains("rng")) {
    if (rng) throw Error(folder + "it was saved without rng");
    return std::nullopt;
  }
  const auto random = part_of_one_process(reader.index().parts.at("rng"));
  if (!random) {
    const std::string text = "rng was saved by several ranks, so it is not loaded";
    if (rng) throw Error(folder + text);
    TORCH_WARN("load: ", folder, text, "; pass rng=false to load without this warning");
  }
  return random;
}

}  // namespace

std::optional<fs::path> latest(const fs::path& run) {
  return looked_at(run, [&] { return latest_of(run); });
}

fs::path verify(const fs::path& path) {
  const Reader reader(found(path));
  for (const auto& [name, entry] : reader.index().tensors) reader.tensor(name);
  return reader.folder();
}

Loaded load(const fs::path& path, const Objects& objects, std::optional<bool> rng) {
  const Reader reader(found(path));
  const Dict& stored = reader.index().parts;
  const std::string folder = reader.folder().string() + ": ";
  std::set<std::string> needed;
  add_tensors_of(stored.at("values"), needed);
  std::map<std::string, at::IValue> parts;
  bool resumes = false;
  bool are_models = true;  // which are loaded to be used, not to be trained further
  for (const auto& [name, object] : objects) {
    if (!stored.contains(name) || name == "rng" || name == "values") {
      throw Error(folder + "it has no " + name + ", only " + names_of_parts(stored));
    }
    const auto part = part_of_one_process(stored.at(name));
    if (!part) throw Error(folder + name + " was saved by several ranks");
    const Mistakes mistakes = mistakes_of(object, *part, reader.index());
    if (!mistakes.empty()) throw Error(folder + name + ": " + text_of(mistakes));
    add_tensors_of(*part, needed);
    parts[name] = *part;
    resumes |= std::holds_alternative<torch::optim::Optimizer*>(object.get());
    are_models &= std::holds_alternative<std::shared_ptr<torch::nn::Module>>(object.get());
  }
  if (!are_models) warn_of_parts_left(stored, objects, folder);
  const auto random = random_part(reader, rng, resumes);
  if (random) add_tensors_of(*random, needed);

  std::map<std::string, at::Tensor> tensors;
  for (const std::string& name : needed) tensors[name] = reader.tensor(name);
  const auto value = [&](const at::IValue& encoded) {
    return decoded(encoded, [&](const std::string& name) { return tensors.at(name); });
  };
  // Models come last. The states of others, which their own code checks, may still be refused.
  for (const size_t kind : {1, 2, 3, 0}) {
    for (const auto& [name, object] : objects) {
      if (object.get().index() != kind) continue;
      const Dict part = value(parts.at(name)).toGenericDict();
      std::visit([&](const auto& one) { load_part(*one, part); }, object.get());
    }
  }
  if (random) set_random_states(value(*random).toGenericDict());
  return {reader.folder(), reader.index().step, value(stored.at("values"))};
}

}  // namespace ampfuse::checkpoint
