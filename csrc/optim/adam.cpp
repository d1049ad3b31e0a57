#include <ampfuse/adam.h>
#include <ampfuse/fused_adam.h>

#include "options.h"

namespace ampfuse {

// --- options -------------------------------------------------------------------------------------

namespace {

// Calls `visit` with the name of each option and its values in both sets of options.
constexpr auto visit_adam_options = [](auto& left, auto& right, const auto& visit) {
  visit("lr", left.lr(), right.lr());
  visit("betas", left.betas(), right.betas());
  visit("eps", left.eps(), right.eps());
  visit("weight_decay", left.weight_decay(), right.weight_decay());
  visit("amsgrad", left.amsgrad(), right.amsgrad());
  visit("maximize", left.maximize(), right.maximize());
  visit("master_weights", left.master_weights(), right.master_weights());
  visit("state_dtype", left.state_dtype(), right.state_dtype());
  visit("max_grad_norm", left.max_grad_norm(), right.max_grad_norm());
  visit("write_back_grads", left.write_back_grads(), right.write_back_grads());
  visit("ema", left.ema(), right.ema());
  visit("ema_dtype", left.ema_dtype(), right.ema_dtype());
  visit("seed", left.seed(), right.seed());
};

}  // namespace

template <bool kDecoupledWeightDecay>
bool operator==(const AdamOptionsOf<kDecoupledWeightDecay>& left,
                const AdamOptionsOf<kDecoupledWeightDecay>& right) {
  return optim::are_equal(left, right, visit_adam_options);
}

template <bool kDecoupledWeightDecay>
std::ostream& operator<<(std::ostream& stream,
                         const AdamOptionsOf<kDecoupledWeightDecay>& options) {
  const char* name = kDecoupledWeightDecay ? "ampfuse::AdamWOptions" : "ampfuse::AdamOptions";
  return optim::print(stream, name, options, visit_adam_options);
}

template AMPFUSE_API bool operator==(const AdamOptions&, const AdamOptions&);
template AMPFUSE_API bool operator==(const AdamWOptions&, const AdamWOptions&);
template AMPFUSE_API std::ostream& operator<<(std::ostream&, const AdamOptions&);
template AMPFUSE_API std::ostream& operator<<(std::ostream&, const AdamWOptions&);

template <bool kDecoupledWeightDecay>
void AdamOptionsOf<kDecoupledWeightDecay>::serialize(torch::serialize::InputArchive& archive) {
  bool decoupled = kDecoupledWeightDecay;  // torch's archives lack this entry
  optim::read_option(archive, "decoupled_weight_decay", decoupled);
  TORCH_CHECK_VALUE(kDecoupledWeightDecay || !decoupled,
                    "decoupled_weight_decay: expected an archive of AdamOptions, got one of "
                    "AdamWOptions; load it into AdamWOptions");
  optim::read_options(archive, *this, visit_adam_options);
}

template <bool kDecoupledWeightDecay>
void AdamOptionsOf<kDecoupledWeightDecay>::serialize(
    torch::serialize::OutputArchive& archive) const {
  optim::write_options(archive, *this, visit_adam_options);
  archive.write("decoupled_weight_decay", torch::IValue(kDecoupledWeightDecay));
}

template struct AdamOptionsOf<false>;
template struct AdamOptionsOf<true>;

// --- state ---------------------------------------------------------------------------------------

void AdamParamState::serialize(torch::serialize::InputArchive& archive) {
  FusedParamState::serialize(archive);
  TORCH_CHECK_VALUE(step().defined(),
                    "loaded state dict: expected the state of Adam or AdamW, which has a step; is "
                    "this the archive of another optimizer?");
}

FusedParamState::Moments AdamParamState::moments() {
  return {{"exp_avg", exp_avg(), &exp_avg_units()},
          {"exp_avg_sq", exp_avg_sq(), &exp_avg_sq_units()},
          {"max_exp_avg_sq", max_exp_avg_sq(), nullptr}};
}

std::unique_ptr<torch::optim::OptimizerParamState> AdamParamState::clone() const {
  return std::make_unique<AdamParamState>(*this);
}

// --- rule ----------------------------------------------------------------------------------------

namespace {

// Calls `visit` with the options as AdamOptions or AdamWOptions.
template <typename Visit>
auto with_adam_options(const torch::optim::OptimizerOptions& options, size_t group, Visit visit) {
  if (const auto* adam = dynamic_cast<const AdamOptions*>(&options)) return visit(*adam);
  const auto* adamw = dynamic_cast<const AdamWOptions*>(&options);
  TORCH_CHECK_TYPE(adamw, "options of group ", group,
                   ": expected ampfuse::AdamOptions or ampfuse::AdamWOptions");
  return visit(*adamw);
}

template <bool kDecoupledWeightDecay>
optim::GroupSettings checked_adam_settings(const AdamOptionsOf<kDecoupledWeightDecay>& options) {
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1, "Invalid beta parameter at index 0: ", beta1);
  TORCH_CHECK_VALUE(beta2 >= 0 && beta2 < 1, "Invalid beta parameter at index 1: ", beta2);
  TORCH_CHECK_VALUE(options.eps() >= 0, "Invalid epsilon value: ", options.eps());
  const size_t moments = options.amsgrad() ? 3 : 2;
  return optim::checked_settings(options, moments, "state_dtype", options.state_dtype());
}

// Warns of a second moment in bfloat16 that can grow but not shrink: multiplied by a beta above
// 1 - 2⁻⁸, a number may be rounded to what it was.
template <bool kDecoupledWeightDecay>
void warn_of_slow_decay(const AdamOptionsOf<kDecoupledWeightDecay>& options) {
  const double beta2 = std::get<1>(options.betas());
  if (options.state_dtype() != at::kBFloat16 || beta2 <= 1 - 0x1p-8) return;
  TORCH_WARN("state_dtype of bfloat16 with a second beta of ", beta2,
             ": rounding keeps a bfloat16 second moment from shrinking if the second beta is above "
             "0.996, so steps stay too small after large gradients. Pass for example "
             "betas({0.9, 0.95})");
}

template <bool kDecoupledWeightDecay>
void step_adam(const AdamOptionsOf<kDecoupledWeightDecay>& options, const optim::StepLists& lists,
               const optim::StepSignals& signals) {
  auto of_step = optim::operator_options<FusedAdamOptions>(options, signals, lists);
  std::tie(of_step.beta1, of_step.beta2) = options.betas();
  of_step.eps = options.eps();
  of_step.amsgrad = options.amsgrad();
  of_step.decoupled_weight_decay = kDecoupledWeightDecay;
  const auto& moments = lists.moments;
  std::vector<at::Tensor> units = lists.units[0];
  units.insert(units.end(), lists.units[1].begin(), lists.units[1].end());
  fused_adam({lists.params, lists.grads, moments[0], moments[1],
              options.amsgrad() ? at::TensorList(moments[2]) : at::TensorList(), lists.state_steps,
              lists.masters, units, lists.ema_params},
             of_step);
}

class AdamRule : public OptimizerRule {
 public:
  const char* name() const override { return "Adam"; }

  std::unique_ptr<FusedParamState> new_state() const override {
    return std::make_unique<AdamParamState>();
  }

  optim::GroupSettings checked_settings(const torch::optim::OptimizerOptions& options,
                                        size_t group) const override {
    return with_adam_options(options, group,
                             [](const auto& adam) { return checked_adam_settings(adam); });
  }

  void check_new(const torch::optim::OptimizerOptions& options) const override {
    with_adam_options(options, 0, [](const auto& adam) { warn_of_slow_decay(adam); });
  }

  void step(const torch::optim::OptimizerOptions& options, const optim::StepLists& lists,
            const optim::StepSignals& signals) const override {
    with_adam_options(options, 0, [&](const auto& adam) { step_adam(adam, lists, signals); });
  }

  void check_archive(torch::serialize::InputArchive& options) const override {
    torch::IValue betas;
    TORCH_CHECK_VALUE(options.try_read("betas", betas),
                      "loaded state dict: expected an archive of Adam or AdamW, whose options have "
                      "betas; is this the archive of another optimizer?");
  }

  void check_archived(FusedParamState& state, const std::string& param) const override {
    TORCH_CHECK_VALUE(state.moments()[0].tensor.defined() && state.moments()[1].tensor.defined(),
                      "loaded state dict: ", param, " has no exp_avg or no exp_avg_sq");
  }
};

const AdamRule adam_rule;

}  // namespace

// --- optimizers ----------------------------------------------------------------------------------

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamOptions defaults)
    : Adam(param_groups, optim::without_limit(defaults), defaults.max_grad_norm()) {}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
             AdamWOptions defaults)
    : Adam(param_groups, optim::without_limit(defaults), defaults.max_grad_norm()) {}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
           std::unique_ptr<torch::optim::OptimizerOptions> defaults,
           std::optional<double> max_grad_norm)
    : FusedOptimizer(adam_rule, param_groups, std::move(defaults), max_grad_norm) {}

}  // namespace ampfuse
