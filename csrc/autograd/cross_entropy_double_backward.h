// The second time that a cross-entropy is differentiated, which is torch's.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "../ops/cross_entropy.h"

namespace ampfuse {

/// The gradient of the logits, as torch's function has it: differentiable.
at::Tensor gradient_of_torch(const CrossEntropyArguments& arguments, const at::Tensor& grad_output);

/// What a function that has its gradient already needs to be gone through once more. It may never
/// be asked, so that this is not saved as what backward needs is: logits may be overwritten then,
/// and a graph that is done with lets go of them.
class ForAnotherTime {
 public:
  explicit ForAnotherTime(torch::autograd::AutogradContext* context) : data_(context->saved_data) {}

  void keep(const CrossEntropyArguments& arguments);
  bool is_kept() const { return data_.find("input") != data_.end(); }
  at::Tensor gradient(const at::Tensor& grad_output) const;
  void let_go() { data_.clear(); }

 private:
  ska::flat_hash_map<std::string, at::IValue>& data_;
};

}  // namespace ampfuse
