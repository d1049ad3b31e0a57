/// \file
/// Checkpoints that Python's ampfuse.checkpoint reads and writes, too: safetensors and JSON, with a
/// hash for each tensor. They are complete or not there, whenever the process is killed.
///
///     ampfuse::checkpoint::save("run", step, {{"model", model}, {"optimizer", optimizer}});
///     const auto loaded =
///         ampfuse::checkpoint::load("run", {{"model", model}, {"optimizer", optimizer}});
///
/// Programs that include this header need xxhash.h and nlohmann/json.hpp (Debian, Ubuntu: apt
/// install libxxhash-dev nlohmann-json3-dev). The library does not, so ampfuse.h does not include
/// this header.
#pragma once

#include <ampfuse/checkpoint/folder.h>
#include <ampfuse/checkpoint/loading.h>

namespace ampfuse::checkpoint {

/// Objects and their names, as {{"model", model}, {"optimizer", optimizer}}. Names are free, except
/// "rng" and "values".
using Objects = std::vector<std::pair<std::string, Object>>;

/// Options of save().
struct SaveOptions {
  /// Numbers, texts, tensors, lists, tuples and dicts of them, which load() returns.
  TORCH_ARG(at::IValue, values);
  /// Store the states of torch's random number generators.
  TORCH_ARG(bool, rng) = true;
  /// Store the gradients of models, for a save between two micro-batches.
  TORCH_ARG(bool, gradients) = false;
  /// Remove older checkpoints of the run, so that this many are left. By default all are kept.
  TORCH_ARG(std::optional<int64_t>, keep);
};

/// The result of load().
struct Loaded {
  std::filesystem::path path;  ///< the checkpoint that was loaded
  int64_t step;                ///< its step
  at::IValue values;           ///< the values that were passed to save(), or None
};

/// Returns the complete checkpoint with the highest step in the folder of a run, or nothing if
/// the folder has no complete checkpoint.
///
/// \throws Error for a folder that cannot be read.
inline std::optional<std::filesystem::path> latest(const std::filesystem::path& run) {
  return detail::looked_at(run, [&] { return detail::latest_of(run); });
}

/// Writes a checkpoint into the folder of a run. Optimizers are saved with masters, scalers with
/// their history.
///
/// \param run The folder of the run, which is created if necessary.
/// \param step The number of the step that was taken last.
/// \param objects Models, ampfuse::Adam, ampfuse::AdamW and ampfuse::GradScaler, with their names.
/// \param options See SaveOptions.
/// \return The path of the checkpoint.
/// \throws Error if it cannot be written. Earlier checkpoints are then as they were.
inline std::filesystem::path save(const std::filesystem::path& run, int64_t step,
                                  const Objects& objects, const SaveOptions& options = {}) {
  using namespace detail;
  if (step < 0) throw Error("save: step: expected 0 or more, got " + std::to_string(step));
  if (options.keep() && *options.keep() < 1) {
    throw Error("save: keep: expected 1 or more, got " + std::to_string(*options.keep()));
  }
  const c10::NoGradGuard no_grad;
  Encoder encode;
  Json parts = Json::object();
  for (const auto& [name, object] : objects) {
    if (name == "rng" || name == "values" || parts.contains(name)) {
      throw Error("save: " + name +
                  ": expected another name: not rng or values, nor that of another object");
    }
    const Dict state = std::visit(
        [&](auto* one) {
          if constexpr (std::is_same_v<decltype(one), torch::nn::Module*>) {
            return state_of(*one, options.gradients());
          } else {
            return state_of(*one);
          }
        },
        object.get());
    parts[name] = encode(state, name);
  }
  if (options.rng()) parts["rng"] = encode(random_states(), "rng");
  parts["values"] = encode(options.values(), "values");
  const std::filesystem::path folder = std::filesystem::absolute(run);
  const auto failed = [&](const std::exception& error) {
    return Error(folder.string() + ": the checkpoint of step " + std::to_string(step) +
                 " could not be written: " + error.what());
  };
  try {
    Writing writing(folder, step);
    Json index = {{"step", step}, {"parts", std::move(parts)}};
    write_all_tensors(writing.folder(), encode.tensors(), index);
    write_index(writing.folder(), index);
    return writing.finish(options.keep());
  } catch (const fs::filesystem_error& error) {
    throw failed(error);
  } catch (const Json::exception& error) {  // of a text that is not UTF-8
    throw failed(error);
  }
}

/// Compares a checkpoint, or the newest one of a run, with its hashes, without loading it.
///
/// \return The path of the checkpoint.
/// \throws Error which names the file or tensor that differs.
inline std::filesystem::path verify(const std::filesystem::path& path) {
  const detail::Reader reader(detail::found(path));
  for (const auto& [name, entry] : reader.content()["tensors"].items()) reader.tensor(name);
  return reader.folder();
}

/// Loads a checkpoint into objects. Everything that is loaded is compared with its hashes first,
/// and models and optimizers with what was saved.
///
/// \param path A checkpoint, or the folder of a run, whose newest checkpoint is loaded.
/// \param objects The objects, each of which must be in the checkpoint under the same name.
/// \param rng Whether the states of random number generators are set. By default they are if an
///     optimizer is loaded.
/// \return The path, step and values of the checkpoint.
/// \throws Error which names what differs, is damaged or is missing. Nothing is loaded then.
/// \throws c10::Error for states that the optimizer's or the scaler's own load() refuses.
inline Loaded load(const std::filesystem::path& path, const Objects& objects,
                   std::optional<bool> rng = std::nullopt) {
  using namespace detail;
  const Reader reader(found(path));
  const Json& stored = reader.content()["parts"];
  std::set<std::string> needed;
  add_tensors_of(stored["values"], needed);
  const std::string folder = reader.folder().string() + ": ";
  std::map<std::string, const Json*> parts;
  bool resumes = false;
  for (const auto& [name, object] : objects) {
    if (!stored.contains(name) || name == "rng" || name == "values") {
      throw Error(folder + "it has no " + name);
    }
    parts[name] = of_one_process(stored[name]);
    if (!parts[name]) throw Error(folder + name + " was saved by several ranks");
    Mistakes mistakes;
    const Json& part = *parts[name];
    std::visit([&](const auto* one) { check(*one, part, reader.content()["tensors"], mistakes); },
               object.get());
    if (!mistakes.empty()) throw Error(folder + name + ": " + text_of(mistakes));
    add_tensors_of(*parts[name], needed);
    resumes |= std::holds_alternative<Adam*>(object.get());
  }
  const Json* random = nullptr;
  if (rng.value_or(resumes)) {
    if (!stored.contains("rng") && rng) throw Error(folder + "it was saved without rng");
    random = stored.contains("rng") ? of_one_process(stored["rng"]) : nullptr;
    if (stored.contains("rng") && !random) {
      const std::string text = "rng was saved by several ranks, so it is not loaded";
      if (rng) throw Error(folder + text);
      TORCH_WARN("load: ", folder, text, "; pass rng=false to load without this warning");
    }
  }
  if (random) add_tensors_of(*random, needed);

  std::map<std::string, at::Tensor> tensors;
  for (const std::string& name : needed) tensors[name] = reader.tensor(name);
  const auto value = [&](const Json& encoded) {
    return decoded(encoded, [&](const std::string& name) { return tensors.at(name); });
  };
  // Optimizers come first, then scalers: only their states can still be refused.
  for (const size_t kind : {1, 2, 0}) {
    for (const auto& [name, object] : objects) {
      if (object.get().index() != kind) continue;
      const Dict state = value(*parts[name]).toGenericDict();
      std::visit([&](auto* one) { detail::load(*one, state); }, object.get());
    }
  }
  if (random) set_random_states(value(*random).toGenericDict());
  return {reader.folder(), reader.content()["step"].get<int64_t>(), value(stored["values"])};
}

}  // namespace ampfuse::checkpoint
