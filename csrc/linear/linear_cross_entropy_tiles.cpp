#include "linear_cross_entropy_tiles.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "../math/cross_entropy_shards.h"
#include "linear_cross_entropy_gradients.h"
#include "linear_cross_entropy_logits.h"

namespace ampfuse {

namespace {

// The classes of one tile, and the layer and the loss of only these classes.
struct ClassTile {
  int64_t first;
  int64_t count;
  LinearLayer layer;
  CrossEntropyArguments loss;
};

// `targets`: [tiles, rows] if targets are indices.
ClassTile tile_at(const LinearCrossEntropyArguments& arguments, const LinearLayer& layer,
                  const std::optional<at::Tensor>& targets, int64_t index, int64_t step) {
  const int64_t classes = arguments.weight.size(0);
  const int64_t first = index * step;
  const int64_t count = std::min(step, classes - first);
  LinearCrossEntropyArguments of_tile = arguments;
  of_tile.weight = arguments.weight.narrow(0, first, count);
  if (arguments.bias) of_tile.bias = arguments.bias->narrow(0, first, count);
  if (arguments.target.is_floating_point()) {
    of_tile.target = arguments.target.narrow(1, first, count);
  }
  of_tile.shard = VocabShard{"", 1, first, classes};
  std::optional<at::Tensor> renumbered;
  if (targets) renumbered = targets->select(0, index);
  const int64_t padded = LinearLayer::padded_size(count, arguments.weight.is_cuda());
  return {first,
          count,
          {layer.weight().narrow(0, first, padded), of_tile.bias, of_tile.dtype},
          of_tile.loss_of_shard(renumbered)};
}

void use_logits(ClassTile& tile, const LinearLogits& memory) {
  tile.loss.input = memory.values(tile.loss.target.size(0), tile.count);
}

void compute_logits(ClassTile& tile, const at::Tensor& hidden, const LinearLogits& memory) {
  use_logits(tile, memory);
  at::Tensor logits = memory.values(hidden.size(0), tile.layer.classes());
  tile.layer.logits(hidden, logits);
}

}  // namespace

LinearCrossEntropyGradients linear_cross_entropy_forward_by_tile(
    const CrossEntropyKernels& kernels, const VocabShardKernels& shard_kernels,
    const LinearCrossEntropyArguments& arguments, const LinearGradientMask& wanted,
    const LinearCrossEntropyOutputs& outputs, const at::Tensor& losses) {
  // Converts the weight once, and not for each tile.
  const LinearLayer layer(arguments.weight, arguments.bias, arguments.dtype);
  const int64_t rows = arguments.hidden.size(0);
  const int64_t classes = std::max<int64_t>(arguments.weight.size(0), 1);
  // The padding of a tile must not overlap the next one.
  const int64_t step = std::min(
      LinearLayer::padded_size(*arguments.chunk_classes, arguments.weight.is_cuda()), classes);
  const int64_t tiles = (classes + step - 1) / step;
  const auto doubles = outputs.divisor.options();
  const at::Tensor hidden = layer.rows(arguments.hidden, 0, rows);
  std::optional<at::Tensor> targets;
  if (!arguments.target.is_floating_point()) {
    targets = targets_of_shards(arguments.target, arguments.options.ignore_index, 0,
                                arguments.weight.size(0), step);
  }
  LinearLogits memory(kernels, arguments, layer);
  memory.allocate(rows, step, any(wanted));

  // First pass: each row's partial sums over each tile.
  const at::Tensor partials = at::full({tiles, rows, math::kShardPartial}, NAN, doubles);
  for (int64_t index = 0; index < tiles; ++index) {
    ClassTile tile = tile_at(arguments, layer, targets, index, step);
    compute_logits(tile, hidden, memory);
    const at::Tensor best = at::empty(outputs.argmax.sizes(), outputs.argmax.options());
    reduce_shard(shard_kernels, tile.loss, tile.first, {partials[index], best});
  }

  // The partial sums of all tiles, joined once.
  const at::Tensor statistics = at::empty({rows, math::kRowStatistics}, doubles);
  ClassTile tile = tile_at(arguments, layer, targets, tiles - 1, step);
  use_logits(tile, memory);
  shard_kernels.join(tile.loss, partials,
                     {losses, statistics, outputs.lse, outputs.entropy, outputs.argmax});

  // Second pass, backwards, since the last tile's logits are in memory.
  const at::Tensor grad_output = outputs.baked_scale.to(at::kDouble);
  LinearCrossEntropyGradients gradients = padded_linear_gradients(arguments, layer, wanted);
  at::Tensor of_hidden = gradients.hidden;
  if (wanted[0] &&
      (of_hidden.scalar_type() != layer.sum_dtype() || of_hidden.sizes() != hidden.sizes())) {
    of_hidden = at::empty(hidden.sizes(), hidden.options().dtype(layer.sum_dtype()));
  }
  for (int64_t index = tiles - 1; index >= 0 && any(wanted); --index) {
    const bool is_first = index == tiles - 1;
    if (!is_first) {
      tile = tile_at(arguments, layer, targets, index, step);
      compute_logits(tile, hidden, memory);
    }
    const at::Tensor grad = memory.grad(rows, tile.count);
    kernels.backward(tile.loss, grad_output, statistics, outputs.divisor, grad);
    const at::Tensor padded = memory.padded_grad(rows, tile.count, tile.layer.classes());
    if (wanted[0]) tile.layer.add_hidden_gradient(padded, of_hidden, is_first);
    if (wanted[1]) {
      at::Tensor of_weight = gradients.weight.narrow(0, tile.first, tile.layer.classes());
      tile.layer.weight_gradient(padded, hidden, of_weight, /*is_first=*/true);
    }
    if (wanted[2]) {
      at::Tensor of_bias = gradients.bias.narrow(0, tile.first, tile.count);
      tile.layer.bias_gradient(grad, of_bias, /*is_first=*/true);
    }
  }
  if (!of_hidden.is_same(gradients.hidden)) {
    gradients.hidden.copy_(of_hidden.narrow(1, 0, gradients.hidden.size(1)));
  }
  return finished_linear_gradients(std::move(gradients), arguments);
}

}  // namespace ampfuse
