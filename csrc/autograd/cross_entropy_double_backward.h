// The second derivative of a cross-entropy, which is computed by torch's function.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "../ops/cross_entropy.h"
#include "../ops/named_arguments.h"

namespace ampfuse {

/// Returns the gradient of the logits, computed by torch's function and differentiable.
at::Tensor gradient_of_torch(const CrossEntropyArguments& arguments, const at::Tensor& grad_output);

/// Keeps the arguments of a loss whose gradient was computed in forward, in case the loss is
/// differentiated twice. This is rare, so they are not saved as tensors for backward, which would
/// forbid programs to overwrite the logits. A backward that does not retain the graph releases
/// them.
class SecondDerivativeInputs {
 public:
  explicit SecondDerivativeInputs(torch::autograd::AutogradContext* context)
      : data_(context->saved_data) {}

  void keep(const CrossEntropyArguments& arguments);
  bool is_kept() const { return data_.find("input") != data_.end(); }
  at::Tensor gradient(const at::Tensor& grad_output) const;
  void release() { data_.clear(); }

 private:
  SavedData& data_;
};

}  // namespace ampfuse
