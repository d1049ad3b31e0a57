#include "linear_cross_entropy_workspace.h"

#include <algorithm>

#include "../math/cross_entropy_shards.h"
#include "linear_cross_entropy_chunks.h"
#include "linear_cross_entropy_product.h"

namespace ampfuse {

namespace {

int64_t bytes_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Returns the bytes of a copy of some rows in this dtype and with padding up to these sizes, or 0
// if no copy is needed.
int64_t copy_bytes(const at::Tensor& matrix, int64_t rows, int64_t padded_rows,
                   int64_t padded_columns, at::ScalarType dtype) {
  const bool is_padded = padded_rows != rows || padded_columns != matrix.size(1);
  const bool is_copied = is_padded || matrix.scalar_type() != dtype;
  return is_copied ? padded_rows * padded_columns * bytes_of(dtype) : 0;
}

}  // namespace

int64_t linear_cross_entropy_workspace(const at::Tensor& hidden, const at::Tensor& weight,
                                       at::ScalarType dtype, at::ScalarType logits_dtype,
                                       at::ScalarType weight_grad_dtype,
                                       std::optional<int64_t> chunk_rows,
                                       std::optional<int64_t> chunk_classes, bool with_gradient,
                                       bool on_gpu) {
  LinearCrossEntropyArguments arguments;
  arguments.hidden = hidden;
  arguments.weight = weight;
  arguments.dtype = dtype;
  arguments.weight_grad_dtype = weight_grad_dtype;
  arguments.chunk_rows = chunk_rows;
  const at::ScalarType sum_dtype = accumulate_dtype(dtype);
  const at::ScalarType gradient_dtype =
      on_gpu || has_wide_product(dtype, at::kCPU) ? dtype : sum_dtype;
  // A gradient overwrites logits of its own dtype, and on a CPU also wider ones.
  const bool overwrites = gradient_dtype == logits_dtype || !on_gpu;
  const int64_t logit_bytes = bytes_of(logits_dtype) + (overwrites ? 0 : bytes_of(gradient_dtype));
  const int64_t all_rows = hidden.size(0);
  const int64_t all_classes = weight.size(0);
  const int64_t rows = chunk_classes ? all_rows : linear_chunk_rows(arguments, logit_bytes, on_gpu);
  const int64_t tile = LinearLayer::padded_size(chunk_classes.value_or(all_classes), on_gpu);
  const int64_t classes = std::min(tile, all_classes);
  const int64_t logits = rows * classes * (with_gradient ? logit_bytes : bytes_of(logits_dtype));
  // Several chunks sum the weight's gradient in float. The logits are freed before it is rounded.
  const int64_t sum = weight.numel() * bytes_of(sum_dtype);
  const int64_t rounded = weight.numel() * bytes_of(weight_grad_dtype);
  const bool is_rounded = with_gradient && !chunk_classes && rows < all_rows && sum > rounded;
  const int64_t most = is_rounded ? std::max(logits + sum - rounded, sum) : logits;
  // A CPU computes 16-bit gradients in float: that of the chunk's hidden states, and then the
  // weight's, one block at a time. With tiles, the hidden states' gradient is summed in float on
  // any device, while the weight's is computed.
  const bool is_wide = with_gradient && sum_dtype != dtype;
  const int64_t hidden_sum =
      is_wide && (!on_gpu || chunk_classes) ? rows * hidden.size(1) * bytes_of(sum_dtype) : 0;
  const int64_t block_sum = classes * weight.size(1) * bytes_of(sum_dtype);
  const int64_t block = is_wide && !on_gpu ? std::min(block_sum, LinearLayer::kBlockBytes) : 0;
  const int64_t wide = chunk_classes ? hidden_sum + block : std::max(hidden_sum, block);
  const int64_t tiles = chunk_classes && classes > 0 ? (all_classes + classes - 1) / classes : 0;
  // Partial sums, and the targets among the tile's classes.
  const int64_t of_tiles = tiles * rows * (math::kShardPartial + 1) * int64_t(sizeof(double));
  const int64_t padded_classes = LinearLayer::padded_size(all_classes, on_gpu);
  const int64_t padded_features = LinearLayer::padded_size(weight.size(1), on_gpu);
  // Gradients that are padded to more features are copied to results without padding.
  const bool has_copies = with_gradient && padded_features != weight.size(1);
  const int64_t copies = has_copies ? rounded + rows * padded_features * bytes_of(dtype) : 0;
  return copies + most + wide + of_tiles + copy_bytes(hidden, rows, rows, padded_features, dtype) +
         copy_bytes(weight, all_classes, padded_classes, padded_features, dtype);
}

}  // namespace ampfuse
