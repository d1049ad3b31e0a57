#include "once_differentiable.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace ampfuse {

namespace {

using NodePointer = decltype(torch::autograd::get_current_node());

// Nodes are held by std::shared_ptr up to torch 2.14, and by c10::intrusive_ptr from 2.15 on. Error
// is a template parameter so that only the branch that is taken is compiled.
template <typename Pointer, typename Error = torch::autograd::Error>
auto make_error(std::string message, torch::autograd::edge_list&& edges) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Error>(std::move(message), std::move(edges));
  } else {
    return c10::make_intrusive<Error>(std::move(message), std::move(edges));
  }
}

}  // namespace

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
      result, make_error<NodePointer>(
                  std::string("ampfuse::") + op + " has no second derivative; use " + instead,
                  std::move(edges)));
  return result;
}

bool is_batched(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Batched) ||
         tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
}

bool is_traced_or_subclass(const at::Tensor& tensor) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return Modes::get_mode(Key::FAKE) || Modes::get_mode(Key::PROXY) ||
         Modes::get_mode(Key::FUNCTIONAL) || tensor.key_set().has(c10::DispatchKey::Python) ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

}  // namespace ampfuse
