/// \file
/// Checkpoints that Python's ampfuse.checkpoint reads and writes, too: safetensors and JSON, with a
/// hash for each tensor. They are complete or not there, whenever the process is killed.
///
///     ampfuse::checkpoint::save("run", step, {{"model", model}, {"optimizer", optimizer}});
///     const auto loaded =
///         ampfuse::checkpoint::load("run", {{"model", model}, {"optimizer", optimizer}});
///
/// One thread at a time may save or load the same objects.
#pragma once

#include <ATen/core/ivalue.h>
#include <ampfuse/export.h>
#include <ampfuse/grad_scaler.h>
#include <torch/arg.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace ampfuse::checkpoint {

/// Thrown for a checkpoint that is damaged, incomplete or of other objects, and for one that cannot
/// be written.
class AMPFUSE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An object that is saved and loaded. A model is held, so that assigning to its holder changes
/// nothing here. Optimizers, scalers and schedulers are referred to: they must neither move nor be
/// destroyed before the last call that gets this object.
class AMPFUSE_API Object {
 public:
  /// Holds a model.
  Object(std::shared_ptr<torch::nn::Module> model);
  /// Holds a model.
  template <std::derived_from<torch::nn::Module> Module>
  Object(const std::shared_ptr<Module>& model)
      : Object(std::shared_ptr<torch::nn::Module>(model)) {}
  /// Holds the model in a holder, for example torch::nn::Sequential.
  template <typename Module>
  Object(const torch::nn::ModuleHolder<Module>& model) : Object(model.ptr()) {}
  /// Holds the model of which this is a reference, as `*this` in a method of the model, but not in
  /// its constructor.
  ///
  /// \throws Error if neither a holder nor a std::shared_ptr owns the model.
  Object(torch::nn::Module& model);
  /// Refers to an optimizer of ampfuse, of torch, or any other one whose save() and load() have the
  /// format of torch's. Python loads what ampfuse's optimizers have saved, and torch's SGD, Adam,
  /// AdamW, RMSprop and Adagrad. Others are for C++ alone.
  Object(torch::optim::Optimizer& optimizer) : object_(&optimizer) {}
  /// Refers to a scaler.
  Object(GradScaler& scaler) : object_(&scaler) {}
  /// Refers to a scheduler, as torch::optim::StepLR. Its count of steps is saved, for C++ alone. A
  /// class that overrides get_lrs() must not need any other state of its own. Learning rates are
  /// saved with the optimizer. If a Gate steps the scheduler, call Gate::wait() before save() and
  /// load().
  Object(torch::optim::LRScheduler& scheduler) : object_(&scheduler) {}
  /// All state of this scheduler is private, so it cannot be saved.
  Object(torch::optim::ReduceLROnPlateauScheduler& scheduler) = delete;

  using Kind = std::variant<std::shared_ptr<torch::nn::Module>, torch::optim::Optimizer*,
                            GradScaler*, torch::optim::LRScheduler*>;  ///< the object
  /// Returns the object.
  const Kind& get() const { return object_; }

 private:
  Kind object_;
};

/// Objects and their names, as {{"model", model}, {"optimizer", optimizer}}. Names are free, except
/// "rng" and "values". It can be neither copied nor moved, so that a class which has it as a member
/// beside the objects themselves cannot move away from them.
class AMPFUSE_API Objects {
 public:
  using Named = std::pair<std::string, Object>;  ///< an object and its name

  /// Makes a list of objects.
  Objects(std::initializer_list<Named> objects = {}) : objects_(objects) {}
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;

  /// Adds an object.
  void add(std::string name, Object object) {
    objects_.emplace_back(std::move(name), std::move(object));
  }

  auto begin() const { return objects_.begin(); }  ///< Returns the first object.
  auto end() const { return objects_.end(); }      ///< Returns the end of the objects.

 private:
  std::vector<Named> objects_;
};

/// Options of save() and save_in_background().
struct SaveOptions {
  /// Numbers, texts, tensors, lists, tuples and dicts of them, which load() returns.
  TORCH_ARG(at::IValue, values);
  /// Store the states of torch's random number generators.
  TORCH_ARG(bool, rng) = true;
  /// Store the gradients of models, for a save between two micro-batches.
  TORCH_ARG(bool, gradients) = false;
  /// Remove checkpoints of earlier steps, so that this many are left, with the new one. Those of
  /// later steps stay. By default all are kept.
  TORCH_ARG(std::optional<int64_t>, keep);
};

/// The result of load().
struct Loaded {
  std::filesystem::path path;  ///< the checkpoint that was loaded
  int64_t step;                ///< its step
  at::IValue values;           ///< the values that were passed to save(), or None
};

/// A checkpoint that is being written, or has been. The destructor waits until it is there. If it
/// could not be written, and no wait() has thrown the error, the destructor prints it as a warning.
class AMPFUSE_API Saving {
 public:
  /// Moves. The moved-from saving may only be assigned to or destroyed.
  Saving(Saving&&) noexcept;
  /// Waits for what was held before, and moves.
  Saving& operator=(Saving&&) noexcept;
  ~Saving();

  /// Returns the path of the checkpoint, which is there when it is complete.
  const std::filesystem::path& path() const;
  /// Returns true if the checkpoint is there, or could not be written.
  bool done() const;
  /// Waits until the checkpoint is on the disk, and returns its path.
  ///
  /// \throws Error if it could not be written.
  const std::filesystem::path& wait();

 private:
  friend Saving save_in_background(const std::filesystem::path&, int64_t, const Objects&,
                                   const SaveOptions&);
  struct State;
  explicit Saving(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Returns the complete checkpoint with the highest step in the folder of a run, or nothing if
/// the folder has no complete checkpoint.
///
/// \throws Error for a folder that cannot be read.
[[nodiscard]] AMPFUSE_API std::optional<std::filesystem::path> latest(
    const std::filesystem::path& run);

/// Writes a checkpoint into the folder of a run. Optimizers are saved with masters, scalers with
/// their history. The host waits for the copies of tensors on a GPU. If another save of this
/// process is under way, this one waits for it.
///
/// \param run The folder of the run, which is created if necessary.
/// \param step The number of the step that was taken last.
/// \param objects Models, optimizers, scalers and schedulers, with their names.
/// \param options See SaveOptions.
/// \return The path of the checkpoint.
/// \throws Error if it cannot be written. Earlier checkpoints are then as they were.
AMPFUSE_API std::filesystem::path save(const std::filesystem::path& run, int64_t step,
                                       const Objects& objects, const SaveOptions& options = {});

/// Copies all tensors, returns, and writes the checkpoint in a thread. The copies take as much
/// memory of the host as the checkpoint takes on the disk.
///
/// Parameters are those of save().
///
/// \throws Error if an object or a value cannot be saved, or if the folder cannot be used. The
///     errors of the thread are thrown by wait() of the result.
[[nodiscard]] AMPFUSE_API Saving save_in_background(const std::filesystem::path& run, int64_t step,
                                                    const Objects& objects,
                                                    const SaveOptions& options = {});

/// Compares a checkpoint, or the newest one of a run, with its hashes, without loading it.
///
/// \return The path of the checkpoint.
/// \throws Error which names the file or tensor that differs.
AMPFUSE_API std::filesystem::path verify(const std::filesystem::path& path);

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
AMPFUSE_API Loaded load(const std::filesystem::path& path, const Objects& objects,
                        std::optional<bool> rng = std::nullopt);

}  // namespace ampfuse::checkpoint
