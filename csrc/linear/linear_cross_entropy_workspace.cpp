#include "linear_cross_entropy_workspace.h"

#include <algorithm>

#include "linear_cross_entropy_chunks.h"
#include "linear_cross_entropy_product.h"

namespace ampfuse {

namespace {

int64_t bytes_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Returns the bytes of a matrix's copy in the dtype of the products, if it has another one.
int64_t copy_bytes(const at::Tensor& matrix, int64_t rows, at::ScalarType dtype) {
  return matrix.scalar_type() == dtype ? 0 : rows * matrix.size(1) * bytes_of(dtype);
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
  const int64_t with_its_gradient =
      bytes_of(logits_dtype) + (overwrites ? 0 : bytes_of(gradient_dtype));
  const int64_t all_rows = hidden.size(0);
  const int64_t all_classes = weight.size(0);
  const int64_t rows =
      chunk_classes ? all_rows : linear_chunk_rows(arguments, with_its_gradient, on_gpu);
  const int64_t classes = std::min(chunk_classes.value_or(all_classes), all_classes);
  const int64_t logits =
      rows * classes * (with_gradient ? with_its_gradient : bytes_of(logits_dtype));
  // Several chunks sum the weight's gradient in float. It is rounded when the logits are freed.
  const int64_t sum = weight.numel() * bytes_of(sum_dtype);
  const int64_t rounded = weight.numel() * bytes_of(weight_grad_dtype);
  const bool is_rounded = with_gradient && !chunk_classes && rows < all_rows && sum > rounded;
  const int64_t most = is_rounded ? std::max(logits + sum - rounded, sum) : logits;
  // A CPU computes 16-bit gradients in float: of all the chunk's hidden states, or a block of the
  // weight's.
  const bool is_wide = with_gradient && !on_gpu && sum_dtype != dtype;
  const int64_t wide = is_wide ? std::max(rows * hidden.size(1) * bytes_of(sum_dtype),
                                          std::min(sum, LinearLayer::kBlockBytes))
                               : 0;
  return most + wide + copy_bytes(hidden, rows, dtype) + copy_bytes(weight, all_classes, dtype);
}

}  // namespace ampfuse
