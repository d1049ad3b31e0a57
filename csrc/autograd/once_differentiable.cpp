#include "once_differentiable.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <memory>
#include <string>
#include <utility>

namespace ampfuse {

at::Tensor once_differentiable(const char* op, const char* instead, const at::Tensor& grad,
                               const at::Tensor& grad_output) {
  if (!c10::GradMode::is_enabled()) return grad;
  torch::autograd::edge_list edges;
  if (const auto node = torch::autograd::get_current_node()) edges = node->next_edges();
  if (grad_output.requires_grad()) {
    edges.push_back(torch::autograd::impl::gradient_edge(grad_output));
  }
  torch::autograd::Variable result = grad;
  torch::autograd::create_gradient_edge(
      result, std::make_shared<torch::autograd::Error>(
                  std::string("ampfuse::") + op + " has no second derivative: " + instead + " has",
                  std::move(edges)));
  return result;
}

bool is_batched(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Batched) ||
         tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
}

bool stands_for_others(const at::Tensor& tensor) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return Modes::get_mode(Key::FAKE) || Modes::get_mode(Key::PROXY) ||
         Modes::get_mode(Key::FUNCTIONAL) || tensor.key_set().has(c10::DispatchKey::Python) ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

}  // namespace ampfuse
