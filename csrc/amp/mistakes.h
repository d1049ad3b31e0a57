// Looks for mistakes in the use of a scaler that raise no error but train on wrong gradients.
#pragma once

#include <torch/optim/optimizer.h>

#include <optional>
#include <unordered_set>

#include "gradients.h"

namespace ampfuse::amp {

struct OptimizerState;

/// Notices by one gradient that gradients were computed again after they were unscaled.
class UnscaledGradient {
 public:
  void note_unscaled(const torch::optim::Optimizer& optimizer);

  /// Records that a loss is scaled to `product`. With `watches`, the backward pass of the product
  /// is watched: it may add to the gradient.
  void note_scaled_loss(const at::Tensor& product, bool watches);

  /// Returns true if the program has reset the gradient, and it was computed again.
  bool was_reset() const { return was_reset_ && param_.grad().defined(); }

  /// Warns if the gradient was computed again.
  void warn_if_computed_again();

 private:
  at::Tensor param_;                    // the first with a gradient
  bool was_reset_ = false;              // the gradient was undefined when a loss was scaled
  std::shared_ptr<bool> was_added_to_;  // by the backward pass of a scaled loss
};

/// Looks for losses that are scaled twice, or not any more.
class Watch {
 public:
  /// Returns true for the first losses, of which more is looked at.
  bool is_at_start() const { return losses_ < 20; }
  int64_t losses() const { return losses_; }

  void note_scaled_loss(const at::Tensor& loss, const at::Tensor& product);

  /// Records the optimizers that have stepped before an update. `must_scale`: only scale() can have
  /// scaled the losses.
  void note_update(const std::vector<OptimizerState>& optimizers, bool must_scale);

 private:
  int64_t losses_ = 0;
  std::optional<Inspection::WeakTensor> last_product_;
  bool has_graph_ = false;                        // a scaled loss had a gradient
  std::unordered_set<const void*> have_stepped_;  // since the last loss
  bool has_warned_ = false;                       // of a loss that was scaled twice
  int repeats_ = 0;  // updates since then in which one of them has stepped again
};

}  // namespace ampfuse::amp
