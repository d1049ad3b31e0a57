// Linear cross-entropy of all rows, one tile of classes at a time, for the least memory.
//
// A first pass computes each row's partial sums over each tile, as for shards of a group of ranks.
// A second pass computes the logits again, and the gradients. A tile's part of the weight's
// gradient is complete after one product, so it needs no float sum. Besides the gradients, memory
// is needed for the logits of one tile and their gradient, for the float sum of the hidden states'
// gradient, and for 88 bytes of partial sums and a target per row and tile. There is one product
// more than with chunks of rows: the logits are computed twice, except those of the last tile.
#pragma once

#include "../ops/linear_cross_entropy.h"

namespace ampfuse {

/// Sets `losses`, [rows] double, and the metrics in `outputs`, whose divisor and baked_scale are
/// set already. Returns the gradients that are wanted.
LinearCrossEntropyGradients linear_cross_entropy_forward_by_tile(
    const CrossEntropyKernels& kernels, const VocabShardKernels& shard_kernels,
    const LinearCrossEntropyArguments& arguments, const LinearGradientMask& wanted,
    const LinearCrossEntropyOutputs& outputs, const at::Tensor& losses);

}  // namespace ampfuse
