#include <ampfuse/checkpoint.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <exception>
#include <thread>

#include "module_part.h"
#include "optimizer_part.h"
#include "random_states.h"
#include "run_folder.h"
#include "scaler_part.h"
#include "scheduler_part.h"
#include "tensor_file.h"

namespace ampfuse::checkpoint {

namespace {

using namespace detail;

// All that a checkpoint will hold, before it is written.
struct Content {
  Index index;
  NamedTensors tensors;
};

Dict part_of_object(const Object& object, const std::string& name, bool gradients) {
  return std::visit(
      [&](const auto& one) {
        using Kind = std::remove_cvref_t<decltype(one)>;
        if constexpr (std::is_same_v<Kind, std::shared_ptr<torch::nn::Module>>) {
          return part_of(*one, gradients);
        } else if constexpr (std::is_same_v<Kind, torch::optim::Optimizer*>) {
          if (one->param_groups().empty()) {
            throw Error("save: " + name +
                        ": the optimizer has no groups of parameters; was it moved from?");
          }
          return part_of(*one);
        } else {
          return part_of(*one);
        }
      },
      object.get());
}

Content content_of(int64_t step, const Objects& objects, const SaveOptions& options) {
  if (step < 0) throw Error("save: step: expected 0 or more, got " + std::to_string(step));
  if (options.keep() && *options.keep() < 1) {
    throw Error("save: keep: expected 1 or more, got " + std::to_string(*options.keep()));
  }
  const c10::NoGradGuard no_grad;
  Encoder encode;
  Content content;
  content.index.step = step;
  Dict& parts = content.index.parts;
  for (const auto& [name, object] : objects) {
    if (name == "rng" || name == "values" || parts.contains(name)) {
      throw Error("save: " + name +
                  ": expected another name: not rng or values, nor that of another object");
    }
    parts.insert(name, encode(part_of_object(object, name, options.gradients()), name));
  }
  if (options.rng()) parts.insert("rng", encode(random_states(), "rng"));
  parts.insert("values", encode(options.values(), "values"));
  content.tensors = encode.tensors();
  return content;
}

// Calls a function, and throws errors of the system as Error.
template <typename Function>
auto writing(const fs::path& run, int64_t step, const Function& function) {
  try {
    return function();
  } catch (const fs::filesystem_error& error) {
    throw Error(run.string() + ": the checkpoint of step " + std::to_string(step) +
                " could not be written: " + error.what());
  }
}

std::unique_ptr<Writing> begin_writing(const fs::path& run, int64_t step) {
  return writing(run, step, [&] { return std::make_unique<Writing>(fs::absolute(run), step); });
}

void write(Writing& checkpoint, Content& content, std::optional<int64_t> keep) {
  write_tensors(checkpoint.folder(), content.tensors, content.index);
  write_index(checkpoint.folder(), content.index);
  checkpoint.finish(keep);
}

}  // namespace

struct Saving::State {
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  ~State() {
    if (thread.joinable()) thread.join();
    if (!error || is_thrown) return;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& one) {
      TORCH_WARN("save: ", one.what());
    }
  }

  fs::path path;
  std::atomic<bool> is_done = false;
  std::exception_ptr error;
  bool is_thrown = false;
  std::thread thread;
};

Saving::Saving(std::unique_ptr<State> state) : state_(std::move(state)) {}
Saving::Saving(Saving&&) noexcept = default;
Saving& Saving::operator=(Saving&&) noexcept = default;
Saving::~Saving() = default;

const fs::path& Saving::path() const {
  return state_->path;
}

bool Saving::done() const {
  return state_->is_done;
}

const fs::path& Saving::wait() {
  if (state_->thread.joinable()) state_->thread.join();
  if (state_->error) {
    state_->is_thrown = true;
    std::rethrow_exception(state_->error);
  }
  return state_->path;
}

fs::path save(const fs::path& run, int64_t step, const Objects& objects,
              const SaveOptions& options) {
  Content content = content_of(step, objects, options);
  const auto checkpoint = begin_writing(run, step);
  writing(run, step, [&] { write(*checkpoint, content, options.keep()); });
  return checkpoint->path();
}

Saving save_in_background(const fs::path& run, int64_t step, const Objects& objects,
                          const SaveOptions& options) {
  Content content = content_of(step, objects, options);
  for (auto& [name, tensor] : content.tensors) {
    const at::Tensor stored = stored_form(tensor);
    tensor = stored.is_alias_of(tensor) ? stored.clone() : stored;
  }
  auto state = std::make_unique<Saving::State>();
  auto checkpoint = begin_writing(run, step);
  state->path = checkpoint->path();
  state->thread =
      std::thread([&state = *state, run, step, keep = options.keep(), content = std::move(content),
                   checkpoint = std::move(checkpoint)]() mutable {
        try {
          writing(run, step, [&] { write(*checkpoint, content, keep); });
        } catch (...) {
          state.error = std::current_exception();
        }
        checkpoint.reset();
        state.is_done = true;
      });
  return Saving(std::move(state));
}

}  // namespace ampfuse::checkpoint
