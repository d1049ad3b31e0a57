// An optimizer's rule: its options, its moments, and the operator that takes its steps. Each fused
// optimizer has one. Everything else is the same for all of them.
#pragma once

#include <ampfuse/fused_optimizer.h>

#include <string>

namespace ampfuse {

namespace optim {

/// The options of a group that are needed outside the rule.
struct GroupSettings {
  double lr;
  double weight_decay;
  MasterWeights master_weights;
  at::ScalarType moment_dtype;
  std::optional<double> max_grad_norm;
  bool write_back_grads;
  size_t moments;  // number of moments that a step needs: the first of those of a state
  bool has_ema;
  at::ScalarType ema_dtype;

  bool is_coded() const { return moment_dtype == at::kChar && moments > 0; }
  bool counts_steps() const {
    return moments > 0 || has_ema || master_weights == MasterWeights::kStochastic;
  }
};

/// The tensors that one call of the operator steps: on one device, all with masters or all without.
/// Complex tensors are viewed as pairs of real numbers.
struct StepLists {
  at::Device device;
  bool has_masters;
  std::vector<at::Tensor> params = {};
  std::vector<at::Tensor> grads = {};
  std::vector<std::vector<at::Tensor>> moments = {};  // a list for each moment that a step needs
  std::vector<at::Tensor> state_steps = {};           // empty if nothing counts steps
  std::vector<at::Tensor> masters = {};
  std::vector<std::vector<at::Tensor>> units = {};  // of each moment; empty if not in 8 bits
  std::vector<at::Tensor> ema_params = {};
  std::vector<int64_t> first_indices = {};  // of each parameter, among all elements of the model
};

/// Scale, flag and norms of a step, on the device of its lists. The options of the operators say
/// what each is.
struct StepSignals {
  std::optional<at::Tensor> grad_scale = std::nullopt;
  std::optional<at::Tensor> found_inf = std::nullopt;
  std::optional<at::Tensor> total_norm = std::nullopt;
  std::optional<double> max_norm = std::nullopt;
  std::optional<at::Tensor> grad_norm = std::nullopt;
};

}  // namespace optim

class OptimizerRule {
 public:
  virtual ~OptimizerRule() = default;

  /// Returns the name of the optimizer in messages.
  virtual const char* name() const = 0;

  /// Returns an empty state of a parameter.
  virtual std::unique_ptr<FusedParamState> new_state() const = 0;

  /// Throws for options of another class, and for values out of range, with torch's message if
  /// torch also checks them. `group` is the index of the group, for the message about a class.
  virtual optim::GroupSettings checked_settings(const torch::optim::OptimizerOptions& options,
                                                size_t group) const = 0;

  /// Checks the options of a new group alone: throws for values that it may be given later, as
  /// torch does, and warns of valid ones that train badly.
  virtual void check_new(const torch::optim::OptimizerOptions&) const {}

  /// Calls the operator. The options have been checked.
  virtual void step(const torch::optim::OptimizerOptions& options, const optim::StepLists& lists,
                    const optim::StepSignals& signals) const = 0;

  /// Throws if the options in an archive are those of another optimizer.
  virtual void check_archive(torch::serialize::InputArchive& options) const = 0;

  /// Throws if a state in an archive lacks a tensor. `param` names the parameter in the message.
  virtual void check_archived(FusedParamState&, const std::string& /*param*/) const {}
};

}  // namespace ampfuse
