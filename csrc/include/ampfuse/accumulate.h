#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ampfuse/export.h>
#include <ampfuse/grad_scaler.h>

#include <utility>

namespace ampfuse {

/// Counts the targets of a micro-batch that are not -100, which losses ignore by default.
struct AMPFUSE_API CountTargets {
  /// Returns the number of targets, on their device.
  ///
  /// \throws c10::TypeError for targets that are not integers.
  at::Tensor operator()(const at::Tensor& targets) const;

  /// Counts the targets of a pair of inputs and targets.
  at::Tensor operator()(const std::pair<at::Tensor, at::Tensor>& pair) const {
    return (*this)(pair.second);
  }
  /// Counts the targets of a struct like torch::data::Example, whose member `target` has them.
  template <typename MicroBatch>
  at::Tensor operator()(const MicroBatch& micro_batch) const {
    return (*this)(micro_batch.target);
  }
};

namespace detail {
inline at::Tensor as_tensor(const at::Tensor& count) {
  return count;
}
inline at::Tensor as_tensor(double count) {
  return at::scalar_tensor(count, at::kDouble);
}
}  // namespace detail

/// Adds up the gradients of micro-batches, and returns the loss of the whole batch.
///
///     const auto step = [&](const auto& micro_batch, const torch::Tensor& denominator) {
///       return ampfuse::cross_entropy(model->forward(micro_batch.data), micro_batch.target,
///                                     ampfuse::CrossEntropyOptions().denominator(denominator));
///     };
///     const torch::Tensor loss = ampfuse::accumulate(step, micro_batches, &scaler);
///     scaler.step(optimizer);
///     scaler.update();
///
/// The gradients are those of the mean loss over all targets of all micro-batches, up to rounding.
/// The mean of the micro-batches' means would give more weight to targets of small micro-batches. A
/// `step` that returns a mean, or ignores its denominator, is not noticed.
/// The host does not wait. Gradients are not averaged over ranks.
///
/// \param step Called as step(micro_batch, denominator), it returns the loss of a micro-batch,
///     which is a sum divided by the denominator, a tensor of one element. It does not call
///     backward().
/// \param micro_batches At least one, in a container such as a vector, which is read twice.
/// \param scaler Scales the losses before their backward passes, or null.
/// \param count Called with a micro-batch, it returns the number, or the total weight, of the
///     targets whose losses are added up: a tensor of one element, or a number. By default a
///     micro-batch is a torch::data::Example, or a pair of inputs and targets, with integer
///     targets, of which those that are not -100 count.
/// \return The sum of the micro-batches' losses, detached, not scaled, on their device.
/// \throws c10::ValueError if there is no micro-batch, if a loss has more than one element, and if
///     `step` has called scaler->scale().
template <typename Step, typename MicroBatches, typename Count = CountTargets>
at::Tensor accumulate(Step&& step, const MicroBatches& micro_batches, GradScaler* scaler = nullptr,
                      const Count& count = {}) {
  at::Tensor denominator;
  for (const auto& micro_batch : micro_batches) {
    const at::Tensor counted = detail::as_tensor(count(micro_batch));
    denominator = denominator.defined() ? denominator.add(counted) : counted;
  }
  TORCH_CHECK_VALUE(denominator.defined(),
                    "accumulate: micro_batches: expected at least one, got none");
  at::Tensor total;
  for (const auto& micro_batch : micro_batches) {
    const int64_t scaled = scaler ? detail::scaled_losses(*scaler) : 0;
    const at::Tensor loss = step(micro_batch, std::as_const(denominator));
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                      "accumulate: step: expected a loss of one element, got ", loss.numel());
    TORCH_CHECK_VALUE(!scaler || detail::scaled_losses(*scaler) == scaled,
                      "accumulate: step has scaled the loss, which the scaler would scale again: "
                      "return the loss as it is");
    (scaler ? scaler->scale(loss) : loss).backward();
    total = total.defined() ? total.add(loss.detach()) : loss.detach();
  }
  return total;
}

}  // namespace ampfuse
