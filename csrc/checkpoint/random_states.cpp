#include "random_states.h"

#include <ATen/Context.h>
#include <torch/cuda.h>

namespace ampfuse::checkpoint::detail {

Dict random_states() {
  Dict states = new_dict();
  states.insert("torch", at::globalContext().defaultGenerator(at::kCPU).get_state());
  List of_gpus = new_list();
  if (torch::cuda::is_available()) {
    for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i) {
      const at::Device gpu(at::kCUDA, i);
      of_gpus.push_back(at::globalContext().defaultGenerator(gpu).get_state());
    }
    states.insert("cuda", of_gpus);
  }
  return states;
}

void set_random_states(const Dict& states) {
  const auto set = [](at::Device device, const at::IValue& state) {
    auto generator = at::globalContext().defaultGenerator(device);
    generator.set_state(state.toTensor());
  };
  set(at::kCPU, states.at("torch"));
  if (!states.contains("cuda") || !torch::cuda::is_available()) return;
  c10::DeviceIndex gpu = 0;
  for (const at::IValue& state : states.at("cuda").toListRef()) {
    if (gpu < torch::cuda::device_count()) set(at::Device(at::kCUDA, gpu++), state);
  }
}

}  // namespace ampfuse::checkpoint::detail
