#include "linear_cross_entropy_gradients.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace ampfuse {

namespace {

LinearCrossEntropyGradients memory_for(LinearCrossEntropyArguments arguments,
                                       const LinearLayer& layer, const LinearGradientMask& wanted,
                                       int64_t chunks) {
  if (chunks > 1) arguments.weight_grad_dtype = accumulate_dtype(arguments.dtype);
  return padded_linear_gradients(arguments, layer, wanted);
}

}  // namespace

LinearCrossEntropyGradients padded_linear_gradients(LinearCrossEntropyArguments arguments,
                                                    const LinearLayer& layer,
                                                    const LinearGradientMask& wanted) {
  arguments.weight = layer.weight();
  return empty_linear_gradients(arguments, wanted);
}

LinearCrossEntropyGradients finished_linear_gradients(
    LinearCrossEntropyGradients gradients, const LinearCrossEntropyArguments& arguments) {
  const int64_t classes = arguments.weight.size(0);
  auto& [of_hidden, of_weight, of_bias] = gradients;
  // A gradient that is not wanted has shape [0], of which slice() takes what there is.
  of_bias = of_bias.slice(0, 0, classes);
  of_weight = of_weight.slice(0, 0, classes);
  if (of_weight.dim() == 2) of_weight = of_weight.narrow(1, 0, arguments.weight.size(1));
  // Memory for padding after the last row may stay.
  of_weight = of_weight.to(arguments.weight_grad_dtype).contiguous();
  return gradients;
}

LinearGradients::LinearGradients(const LinearCrossEntropyArguments& arguments,
                                 const LinearLayer& layer, const LinearGradientMask& wanted,
                                 int64_t chunks)
    : arguments_(arguments),
      layer_(layer),
      wanted_(wanted),
      gradients_(memory_for(arguments, layer, wanted, chunks)) {
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
  return finished_linear_gradients(std::move(gradients_), arguments_);
}

}  // namespace ampfuse
