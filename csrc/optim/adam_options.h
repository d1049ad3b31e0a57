// Checks the options of a parameter group, AdamOptions or AdamWOptions, and converts them to one
// struct.
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

/// Throws for options of classes other than AdamOptions and AdamWOptions, and for values out of
/// range, with torch's message if torch also checks them. `group` is the index of the group, for
/// the message about a class.
AdamSettings checked_settings(const torch::optim::OptimizerOptions& options, size_t group);

/// Throws for a negative learning rate or weight decay. Only constructors and add_param_group()
/// call this: schedules may go below 0 later, as in torch.
void check_initial(const AdamSettings& settings);

/// Warns of a second moment in bfloat16 that can grow but not shrink: multiplied by a beta above
/// 1 - 2⁻⁸, a number may be rounded to what it was.
void warn_of_slow_decay(const AdamSettings& settings);

/// Throws unless the limit is absent or at least 0.
void check_max_grad_norm(std::optional<double> max_grad_norm);

}  // namespace ampfuse::optim
