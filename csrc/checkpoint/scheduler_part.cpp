#include "scheduler_part.h"

#include <c10/util/Type.h>

#include <typeinfo>

namespace ampfuse::checkpoint::detail {

namespace {

// torch has no function that returns or sets the count, but its name is protected, not private.
struct Count : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&Count::step_count_);
  }
};

// Python's StepLR has another name: it counts from 1, and so reduces the rate a step earlier.
std::string class_of(const torch::optim::LRScheduler& scheduler) {
  return c10::demangle(typeid(scheduler).name());
}

}  // namespace

Dict part_of(torch::optim::LRScheduler& scheduler) {
  Dict state = new_dict();
  state.insert("step_count", static_cast<int64_t>(Count::of(scheduler)));
  Dict part = new_dict();
  part.insert("class", class_of(scheduler));
  part.insert("state", state);
  return part;
}

void check_part(torch::optim::LRScheduler& scheduler, const at::IValue& part, Mistakes& mistakes) {
  check_class(class_of(scheduler), part, mistakes);
}

void load_part(torch::optim::LRScheduler& scheduler, const Dict& part) {
  const Dict state = part.at("state").toGenericDict();
  Count::of(scheduler) = static_cast<unsigned>(state.at("step_count").toInt());
}

}  // namespace ampfuse::checkpoint::detail
