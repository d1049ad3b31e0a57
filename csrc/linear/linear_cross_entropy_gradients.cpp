#include "linear_cross_entropy_gradients.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace ampfuse {

namespace {

LinearCrossEntropyGradients memory_for(LinearCrossEntropyArguments arguments,
                                       const LinearGradientMask& wanted, int64_t chunks) {
  if (chunks > 1) arguments.weight_grad_dtype = accumulate_dtype(arguments.dtype);
  return empty_linear_gradients(arguments, wanted);
}

}  // namespace

LinearGradients::LinearGradients(const LinearCrossEntropyArguments& arguments,
                                 const LinearLayer& layer, const LinearGradientMask& wanted,
                                 int64_t chunks)
    : arguments_(arguments),
      layer_(layer),
      wanted_(wanted),
      gradients_(memory_for(arguments, wanted, chunks)) {
  if (chunks > 0) return;
  gradients_.weight.zero_();
  gradients_.bias.zero_();
}

void LinearGradients::add(const at::Tensor& grad, const at::Tensor& hidden, int64_t first_row) {
  const bool is_first = first_row == 0;
  if (wanted_[0]) add_hidden(grad, first_row);
  if (wanted_[1]) layer_.weight_gradient(grad, hidden, gradients_.weight, is_first);
  if (wanted_[2]) layer_.bias_gradient(grad, gradients_.bias, is_first);
}

void LinearGradients::add_hidden(const at::Tensor& grad, int64_t first_row) {
  const at::Tensor of_rows = gradients_.hidden.narrow(0, first_row, grad.size(0));
  if (!arguments_.shard) return layer_.hidden_gradient(grad, of_rows);
  // Each rank's partial sum has sum_dtype(). Only the sum of all ranks is rounded.
  const at::Tensor partial =
      at::empty(of_rows.sizes(), of_rows.options().dtype(layer_.sum_dtype()));
  layer_.hidden_gradient(grad, partial);
  sums_.begin(*arguments_.shard, partial, of_rows);
}

LinearCrossEntropyGradients LinearGradients::finish() {
  sums_.finish();
  at::Tensor& of_weight = gradients_.weight;
  if (of_weight.scalar_type() != arguments_.weight_grad_dtype) {
    of_weight = of_weight.to(arguments_.weight_grad_dtype);
  }
  return std::move(gradients_);
}

}  // namespace ampfuse
