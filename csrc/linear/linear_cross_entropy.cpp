// Linear cross-entropy, one chunk of rows at a time, or with chunk_classes one tile of classes
// (linear_cross_entropy_tiles.h). A chunk computes its logits, in memory that all chunks share,
// then the loss and the logits' gradient in one pass, and then adds to the gradients of hidden
// states, weight and bias.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ampfuse/autocast.h>

#include <cmath>
#include <numeric>

#include "../math/cross_entropy_shards.h"
#include "../ops/linear_cross_entropy_kernels.h"
#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "linear_cross_entropy_chunks.h"
#include "linear_cross_entropy_tiles.h"

namespace ampfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using LinearChunk = LinearChunks::Chunk;

void check_all_memory(const LinearCrossEntropyArguments& arguments) {
  check_memory(kLinearCrossEntropy, "hidden", arguments.hidden);
  check_memory(kLinearCrossEntropy, "weight", arguments.weight);
  if (arguments.bias) check_memory(kLinearCrossEntropy, "bias", *arguments.bias);
  check_memory(kLinearCrossEntropy, "target", arguments.target);
  const OptionalTensor& class_weight = arguments.class_weight;
  if (class_weight) check_memory(kLinearCrossEntropy, "class_weight", *class_weight);
}

// Returns the largest factor by which class weights enlarge a gradient, at least 1.
at::Tensor largest_class_weight(const at::Tensor& class_weight) {
  if (class_weight.numel() == 0) return at::ones({}, class_weight.options());
  return class_weight.abs().amax().clamp_min(1);
}

// Returns the scale of fp16 gradients if the caller gave no grad_scale. With it, the logits'
// gradients are at most 1 in magnitude, apart from the term of z_loss.
at::Tensor fp16_scale(const LinearCrossEntropyArguments& arguments, const at::Tensor& denominator) {
  const at::Tensor scale = arguments.options.is_mean()
                               ? denominator.to(at::kFloat)
                               : at::ones({}, denominator.options().dtype(at::kFloat));
  const OptionalTensor& weight = arguments.class_weight;
  return weight ? scale / largest_class_weight(*weight) : scale;
}

// Returns the chunk's rows of a tensor that has one entry per row, or is empty.
at::Tensor rows_of(const at::Tensor& all, const LinearChunk& chunk) {
  return all.numel() == 0 ? all : all.narrow(0, chunk.first_row, chunk.rows);
}

// Sets divisor and baked_scale in the outputs of a forward whose kernels do not set them.
void set_divisor_and_scale(const LinearCrossEntropyArguments& arguments,
                           const OptionalTensor& grad_scale, const at::Tensor& denominator,
                           const LinearCrossEntropyOutputs& outputs) {
  const at::Tensor& baked_scale = outputs.baked_scale;
  const at::Tensor& divisor = outputs.divisor;
  arguments.options.is_mean() ? divisor.copy_(denominator) : divisor.fill_(1);
  baked_scale.fill_(1);
  if (!grad_scale) return;
  baked_scale.copy_(at::where(at::isfinite(*grad_scale).logical_and(grad_scale->ne(0)), *grad_scale,
                              baked_scale));
  const float limit = arguments.gradient_limit();
  if (limit == HUGE_VALF) return;
  // Lower the scale as math::baked_scale() does.
  const at::Tensor excess = (baked_scale / divisor).abs() / limit;
  const at::Tensor lower = at::ldexp(baked_scale, -1 - excess.log2().floor());
  baked_scale.copy_(at::where(excess.gt(1).logical_and(at::isfinite(excess)), lower, baked_scale));
}

// Adds the losses in an order that does not depend on threads.
at::Tensor sum_of(const at::Tensor& losses) {
  if (!losses.is_cpu()) return losses.sum();
  const double* const first = losses.const_data_ptr<double>();
  return at::scalar_tensor(std::accumulate(first, first + losses.numel(), 0.0), losses.options());
}

// Does what math::reduced_loss() does, on the device.
at::Tensor reduced_loss(const at::Tensor& losses, const at::Tensor& divisor) {
  return at::where(divisor.eq(0), NAN, sum_of(losses) / divisor);
}

// Forward of a rank that has all classes.
LinearCrossEntropyGradients forward_whole(const CrossEntropyKernels& kernels, LinearChunks& chunks,
                                          const OptionalTensor& scale,
                                          const at::Tensor& denominator,
                                          const LinearGradientMask& wanted,
                                          const LinearCrossEntropyOutputs& outputs) {
  const at::Tensor& loss = outputs.loss;
  const bool is_per_row = loss.dim() == 1;
  const at::Tensor losses = at::empty({is_per_row ? 0 : chunks.chunks()}, loss.options());
  auto gradients = chunks.each(wanted, [&](const LinearChunk& chunk) {
    const LossOutputs of_chunk = {
        .loss = is_per_row ? rows_of(loss, chunk) : losses.select(0, chunk.index),
        .baked_scale = outputs.baked_scale,
        .statistics = rows_of(outputs.statistics, chunk),
        .divisor = outputs.divisor,
        .lse = rows_of(outputs.lse, chunk),
        .entropy = rows_of(outputs.entropy, chunk),
        .argmax = rows_of(outputs.argmax, chunk)};
    kernels.forward(chunk.loss, scale, denominator, {of_chunk, chunk.grad});
  });
  if (!is_per_row) loss.copy_(losses.sum(at::kDouble));
  return gradients;
}

// Forward of a rank that has some of the classes. Ranks exchange only their partial results of each
// row, and the sums of the hidden states' gradients.
LinearCrossEntropyGradients forward_of_shard(const CrossEntropyKernels& kernels,
                                             const VocabShardKernels& shard_kernels,
                                             const VocabShard& shard, LinearChunks& chunks,
                                             const LinearGradientMask& wanted,
                                             const LinearCrossEntropyOutputs& outputs) {
  const at::Tensor& loss = outputs.loss;
  const at::Tensor& divisor = outputs.divisor;
  const auto doubles = divisor.options();
  const at::Tensor grad_output = outputs.baked_scale.to(at::kDouble);
  const at::Tensor losses = at::empty({chunks.rows()}, doubles);
  auto gradients = chunks.each(wanted, [&](const LinearChunk& chunk) {
    const at::Tensor best = rows_of(outputs.argmax, chunk);
    const at::Tensor partials = at::full({chunk.rows, math::kShardPartial}, NAN, doubles);
    reduce_shard(shard_kernels, chunk.loss, shard.first_class, {partials, best});
    const at::Tensor of_rows = any(wanted) ? at::empty({chunk.rows, math::kRowStatistics}, doubles)
                                           : rows_of(outputs.statistics, chunk);
    shard_kernels.join(chunk.loss, gather(shard, partials),
                       {rows_of(losses, chunk), of_rows, rows_of(outputs.lse, chunk),
                        rows_of(outputs.entropy, chunk), best});
    if (any(wanted)) kernels.backward(chunk.loss, grad_output, of_rows, divisor, chunk.grad);
  });
  loss.copy_(loss.dim() == 1 ? losses : reduced_loss(losses, divisor));
  return gradients;
}

}  // namespace

LinearCrossEntropyOutputs linear_cross_entropy_forward_by_chunk(
    const CrossEntropyKernels& kernels, const VocabShardKernels& shard_kernels,
    const LinearCrossEntropyArguments& arguments, const OptionalTensor& grad_scale,
    const OptionalTensor& denominator, const LinearGradientMask& wanted, bool with_metrics) {
  const NoAutocastGuard no_autocast;  // the dtype of products was chosen before
  auto outputs = empty_linear_outputs(arguments, wanted, with_metrics);
  const at::Tensor& loss = outputs.loss;
  const at::Tensor& divisor = outputs.divisor;
  const LinearGradientMask wanted_now =
      arguments.options.is_per_row() ? LinearGradientMask{} : wanted;
  check_all_memory(arguments);
  const at::Tensor weight_sum = at::empty({}, divisor.options());
  kernels.weigh(arguments.loss(), weight_sum);
  const at::Tensor mean_denominator = denominator.value_or(weight_sum);
  OptionalTensor scale = grad_scale;
  const bool has_fp16 = arguments.dtype == at::kHalf || arguments.hidden.scalar_type() == at::kHalf;
  if (!scale && any(wanted_now) && has_fp16) scale = fp16_scale(arguments, mean_denominator);
  if (arguments.chunk_classes && arguments.hidden.size(0) > 0) {
    set_divisor_and_scale(arguments, scale, mean_denominator, outputs);
    const at::Tensor losses = at::empty({arguments.hidden.size(0)}, divisor.options());
    outputs.gradients = linear_cross_entropy_forward_by_tile(kernels, shard_kernels, arguments,
                                                             wanted_now, outputs, losses);
    loss.copy_(reduced_loss(losses, divisor));
    return outputs;
  }
  LinearChunks chunks(kernels, arguments, any(wanted_now));
  if (chunks.chunks() == 0) {
    set_divisor_and_scale(arguments, std::nullopt, mean_denominator, outputs);
    outputs.gradients = chunks.each(wanted_now, [](const LinearChunk&) {});
    if (loss.dim() == 0) loss.copy_(reduced_loss(at::empty({0}, divisor.options()), divisor));
  } else if (arguments.shard) {
    set_divisor_and_scale(arguments, scale, mean_denominator, outputs);
    outputs.gradients =
        forward_of_shard(kernels, shard_kernels, *arguments.shard, chunks, wanted_now, outputs);
  } else {
    outputs.gradients =
        forward_whole(kernels, chunks, scale, mean_denominator, wanted_now, outputs);
  }
  return outputs;
}

LinearCrossEntropyGradients linear_cross_entropy_backward_by_chunk(
    const CrossEntropyKernels& kernels, const at::Tensor& grad_output,
    const LinearCrossEntropyArguments& arguments, const at::Tensor& statistics,
    const at::Tensor& divisor, const LinearGradientMask& wanted) {
  const NoAutocastGuard no_autocast;  // the dtype of products was chosen before
  check_all_memory(arguments);
  LinearChunks chunks(kernels, arguments, /*with_gradient=*/true);
  // Checks the targets again, because they may have been written since forward.
  kernels.weigh(arguments.loss(), at::empty({}, divisor.options()));
  at::Tensor row_grads = grad_output.to(at::kDouble).contiguous();
  OptionalTensor peak;
  if (arguments.dtype == at::kHalf && row_grads.numel() > 0) {
    // Divide by the largest |grad_output|, so that fp16 gradients stay below gradient_limit().
    // A class weight enlarges `peak` only by the factor by which it exceeds the limit: if no target
    // has that class, dividing by the whole weight would cost the other gradients digits.
    const OptionalTensor& weight = arguments.class_weight;
    at::Tensor largest = row_grads.abs().amax();
    if (weight) {
      largest = largest * (largest_class_weight(*weight) / arguments.gradient_limit()).clamp_min(1);
    }
    const at::Tensor is_usable = at::isfinite(largest).logical_and(largest > 0);
    peak = at::where(is_usable, largest, at::ones_like(largest));
    row_grads = row_grads / *peak;
  }
  auto gradients = chunks.each(wanted, [&](const LinearChunk& chunk) {
    kernels.backward(chunk.loss, rows_of(row_grads, chunk), rows_of(statistics, chunk), divisor,
                     chunk.grad);
  });
  if (!peak) return gradients;
  auto& [of_hidden, of_weight, of_bias] = gradients;
  for (at::Tensor* const gradient : {&of_hidden, &of_weight, &of_bias}) gradient->mul_(*peak);
  return gradients;
}

AMPFUSE_KERNELS(CPU, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCpu, kVocabShardsCpu>>(m);
}

}  // namespace ampfuse
