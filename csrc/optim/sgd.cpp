#include <ampfuse/fused_sgd.h>
#include <ampfuse/sgd.h>

#include <cmath>

#include "options.h"

namespace ampfuse {

// --- options -------------------------------------------------------------------------------------

namespace {

// Calls `visit` with the name of each option and its values in both sets of options.
constexpr auto visit_sgd_options = [](auto& left, auto& right, const auto& visit) {
  visit("lr", left.lr(), right.lr());
  visit("momentum", left.momentum(), right.momentum());
  visit("dampening", left.dampening(), right.dampening());
  visit("weight_decay", left.weight_decay(), right.weight_decay());
  visit("nesterov", left.nesterov(), right.nesterov());
  visit("maximize", left.maximize(), right.maximize());
  visit("master_weights", left.master_weights(), right.master_weights());
  visit("momentum_dtype", left.momentum_dtype(), right.momentum_dtype());
  visit("max_grad_norm", left.max_grad_norm(), right.max_grad_norm());
  visit("write_back_grads", left.write_back_grads(), right.write_back_grads());
  visit("ema", left.ema(), right.ema());
  visit("ema_dtype", left.ema_dtype(), right.ema_dtype());
  visit("seed", left.seed(), right.seed());
};

}  // namespace

bool operator==(const SGDOptions& left, const SGDOptions& right) {
  return optim::are_equal(left, right, visit_sgd_options);
}

std::ostream& operator<<(std::ostream& stream, const SGDOptions& options) {
  return optim::print(stream, "ampfuse::SGDOptions", options, visit_sgd_options);
}

void SGDOptions::serialize(torch::serialize::InputArchive& archive) {
  optim::read_options(archive, *this, visit_sgd_options);
}

void SGDOptions::serialize(torch::serialize::OutputArchive& archive) const {
  optim::write_options(archive, *this, visit_sgd_options);
}

// --- state ---------------------------------------------------------------------------------------

void SGDParamState::serialize(torch::serialize::InputArchive& archive) {
  FusedParamState::serialize(archive);
  if (!step().defined()) step(at::scalar_tensor(momentum_buffer().defined() ? 1 : 0, at::kFloat));
}

FusedParamState::Moments SGDParamState::moments() {
  return {{"momentum_buffer", momentum_buffer(), &momentum_buffer_units()}};
}

bool SGDParamState::has_started() const {
  return step().defined() && step().item<float>() > 0;
}

std::unique_ptr<torch::optim::OptimizerParamState> SGDParamState::clone() const {
  return std::make_unique<SGDParamState>(*this);
}

// --- rule ----------------------------------------------------------------------------------------

namespace {

class SGDRule : public OptimizerRule {
 public:
  const char* name() const override { return "SGD"; }

  std::unique_ptr<FusedParamState> new_state() const override {
    return std::make_unique<SGDParamState>();
  }

  optim::GroupSettings checked_settings(const torch::optim::OptimizerOptions& options,
                                        size_t group) const override {
    const auto* sgd = dynamic_cast<const SGDOptions*>(&options);
    TORCH_CHECK_TYPE(sgd, "options of group ", group, ": expected ampfuse::SGDOptions");
    TORCH_CHECK_VALUE(sgd->momentum() >= 0 && std::isfinite(sgd->momentum()),
                      "Invalid momentum value: ", sgd->momentum());
    TORCH_CHECK_VALUE(std::isfinite(sgd->dampening()),
                      "Invalid dampening value: ", sgd->dampening());
    const size_t moments = sgd->momentum() == 0 ? 0 : 1;
    return optim::checked_settings(*sgd, moments, "momentum_dtype", sgd->momentum_dtype());
  }

  void check_new(const torch::optim::OptimizerOptions& options) const override {
    const auto& sgd = dynamic_cast<const SGDOptions&>(options);
    TORCH_CHECK_VALUE(!sgd.nesterov() || (sgd.momentum() > 0 && sgd.dampening() == 0),
                      "Nesterov momentum requires a momentum and zero dampening");
  }

  void step(const torch::optim::OptimizerOptions& options, const optim::StepLists& lists,
            const optim::StepSignals& signals) const override {
    const auto& sgd = dynamic_cast<const SGDOptions&>(options);
    auto of_step = optim::operator_options<FusedSgdOptions>(sgd, signals, lists);
    of_step.momentum = sgd.momentum();
    of_step.dampening = sgd.dampening();
    of_step.nesterov = sgd.nesterov() && sgd.momentum() != 0;  // as in torch
    const bool has_momentum = !lists.moments.empty();
    fused_sgd({lists.params, lists.grads,
               has_momentum ? at::TensorList(lists.moments[0]) : at::TensorList(),
               lists.state_steps, lists.masters,
               has_momentum ? at::TensorList(lists.units[0]) : at::TensorList(), lists.ema_params},
              of_step);
  }

  void check_archive(torch::serialize::InputArchive& options) const override {
    torch::IValue dampening;
    TORCH_CHECK_VALUE(options.try_read("dampening", dampening),
                      "loaded state dict: expected an archive of SGD, whose options have "
                      "dampening; is this the archive of another optimizer?");
  }
};

const SGDRule sgd_rule;

}  // namespace

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, SGDOptions defaults)
    : FusedOptimizer(sgd_rule, param_groups, optim::without_limit(defaults),
                     defaults.max_grad_norm()) {}

}  // namespace ampfuse
