// The options of a parameter group, whichever class they are of, checked.
#pragma once

#include <ampfuse/optim.h>

namespace ampfuse::optim {

struct AdamSettings {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool amsgrad;
  bool maximize;
  bool decoupled_weight_decay;
  MasterWeights master_weights;
  at::ScalarType state_dtype;
  std::optional<double> max_grad_norm;
  bool write_back_grads;
};

/// Refuses options of another class than AdamOptions and AdamWOptions, and values that no step
/// could make sense of, in torch's words where torch refuses them too. `group` is for the message.
AdamSettings checked_settings(const torch::optim::OptimizerOptions& options, size_t group);

/// Refuses what an optimizer may not begin with; schedules may go below 0, as with torch's.
void check_first(const AdamSettings& settings);

/// Refuses what checked_settings would.
void check_max_grad_norm(std::optional<double> max_grad_norm);

}  // namespace ampfuse::optim
