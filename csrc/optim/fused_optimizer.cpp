#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <unordered_set>

#include "../tensors/capture.h"
#include "../tensors/device_scalars.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/host_copy.h"
#include "../tensors/tensor_list.h"
#include "clip.h"
#include "options.h"

namespace ampfuse {

namespace {

using optim::GroupLists;
using optim::GroupSettings;
using optim::StepLists;
using optim::StepSignals;

// Checks the options and parameters of all groups, before anything is written.
std::vector<GroupSettings> checked_settings(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::optional<double> max_grad_norm, const OptimizerRule& rule) {
  optim::check_max_grad_norm(max_grad_norm);
  std::vector<GroupSettings> settings;
  for (size_t i = 0; i < groups.size(); ++i) {
    settings.push_back(rule.checked_settings(groups[i].options(), i));
    optim::check_params(groups[i], settings[i], i, rule);
  }
  return settings;
}

using KnownParams = std::unordered_set<const void*>;

// Adds the parameters of a group to those that are known. Throws if one is known already.
void add_new_params(const torch::optim::OptimizerParamGroup& group, size_t group_index,
                    KnownParams& known) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    TORCH_CHECK_VALUE(known.insert(group.params()[i].unsafeGetTensorImpl()).second,
                      "some parameters appear in more than one parameter group, or twice in one: "
                      "parameter ",
                      i, " of group ", group_index);
  }
}

// Returns the parameters of all groups. Throws if one is in them twice.
KnownParams known_params(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  KnownParams known;
  for (size_t i = 0; i < groups.size(); ++i) add_new_params(groups[i], i, known);
  return known;
}

size_t number_of_params(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  size_t params = 0;
  for (const auto& group : groups) params += group.params().size();
  return params;
}

void check_scalar(const char* name, const std::optional<at::Tensor>& scalar) {
  TORCH_CHECK_TYPE(!scalar || scalar->defined(), name, ": expected a tensor, got an undefined one");
}

bool are_on_gpu(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    if (!group.params().empty()) return group.params()[0].is_cuda();
  }
  return false;
}

std::optional<at::Tensor> on_device_if_any(const std::optional<at::Tensor>& scalar,
                                           at::Device device) {
  if (!scalar) return std::nullopt;
  return on_device(*scalar, device);
}

void clip_on(at::Device device, const optim::Clip& clip, StepSignals& signals) {
  signals.total_norm = on_device(clip.total_norm, device);
  signals.max_norm = clip.max_norm;
  if (clip.grad_norm.defined() && clip.grad_norm.device() == device) {
    signals.grad_norm = clip.grad_norm;
  }
}

// Returns the tensor that receives the norm: `current`, unless the gradients that the norm covers
// have moved to another device.
at::Tensor norm_tensor(const at::Tensor& current, const std::vector<GroupLists>& groups) {
  std::optional<at::Device> device;
  for (const GroupLists& group : groups) {
    if (device || group.settings.max_grad_norm || group.lists.empty()) continue;
    device = group.lists[0].device;
  }
  if (current.defined() && (!device || current.device() == *device)) return current;
  return at::zeros({}, at::TensorOptions(device.value_or(at::kCPU)).dtype(at::kFloat));
}

size_t number_of_calls(const std::vector<GroupLists>& groups) {
  size_t calls = 0;
  for (const GroupLists& group : groups) calls += group.lists.size();
  return calls;
}

// Returns the properties of a tensor that may make the op throw, as the bits of one number.
uintptr_t kind_of(const at::Tensor& tensor) {
  const bool is_strided = tensor.layout() == at::kStrided;
  const bool is_dense = is_strided && tensor.is_non_overlapping_and_dense();
  const bool is_allocated = is_strided && has_memory(tensor);
  return static_cast<uintptr_t>(tensor.scalar_type()) << 3 | static_cast<uintptr_t>(is_strided) |
         static_cast<uintptr_t>(is_dense) << 1 | static_cast<uintptr_t>(is_allocated) << 2;
}

// Returns the properties of the tensors that may make the op throw and may change from step to
// step: kinds and addresses, with a 0 after those of each call. Most gradients have a new address
// at each step. Their addresses are included only if the op writes them: only then must gradients
// not share memory.
std::vector<uintptr_t> checked_properties(const std::vector<GroupLists>& groups) {
  std::vector<uintptr_t> properties;
  const auto add = [&](const std::vector<at::Tensor>& tensors, bool with_address) {
    for (const at::Tensor& tensor : tensors) {
      properties.push_back(kind_of(tensor));
      if (!with_address || tensor.layout() != at::kStrided) continue;
      properties.push_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
    }
  };
  for (const GroupLists& group : groups) {
    for (const StepLists& lists : group.lists) {
      for (const auto* state : {&lists.params, &lists.state_steps, &lists.masters}) {
        add(*state, /*with_address=*/true);
      }
      for (const auto& moments : lists.moments) add(moments, /*with_address=*/true);
      for (const auto& units : lists.units) add(units, /*with_address=*/true);
      add(lists.ema_params, /*with_address=*/true);
      add(lists.grads, group.settings.write_back_grads);
      properties.push_back(0);
    }
  }
  return properties;
}

// Checks all calls before one of them writes: makes each with found_inf = 1, so that it checks its
// arguments and skips the step. A call that throws writes nothing, but without this, the calls
// before it would already have stepped.
void check_before_writing(const std::vector<GroupLists>& groups, const OptimizerRule& rule) {
  for (const GroupLists& group : groups) {
    for (const StepLists& lists : group.lists) {
      const auto is_skipped = at::ones({}, at::TensorOptions(lists.device).dtype(at::kFloat));
      rule.step(group.options, lists, {.found_inf = is_skipped});
    }
  }
}

void step_groups(const std::vector<GroupLists>& groups, const OptimizerRule& rule,
                 const FusedOptimizer& optimizer, const at::Tensor& grad_norm,
                 const std::vector<at::Tensor>& known_norms) {
  const bool find_inf = optimizer.grad_scale && !optimizer.found_inf;
  const auto clips = optim::inspect_for_clipping(groups, optimizer.max_grad_norm, grad_norm,
                                                 find_inf, known_norms);
  const auto& found_inf = find_inf ? clips.found_inf : optimizer.found_inf;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const StepLists& lists : groups[i].lists) {
      StepSignals signals;
      signals.grad_scale = on_device_if_any(optimizer.grad_scale, lists.device);
      signals.found_inf = on_device_if_any(found_inf, lists.device);
      if (clips.of_groups[i]) clip_on(lists.device, *clips.of_groups[i], signals);
      rule.step(groups[i].options, lists, signals);
    }
  }
}

}  // namespace

FusedOptimizer::FusedOptimizer(const OptimizerRule& rule,
                               const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               std::optional<double> max_grad_norm)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      max_grad_norm(max_grad_norm),
      rule_(&rule) {
  optim::check_initial(rule.checked_settings(this->defaults(), /*group=*/0));
  optim::check_max_grad_norm(max_grad_norm);
  if (param_groups.empty()) rule.check_new(this->defaults());
  for (const auto& group : param_groups) add_param_group(group);
}

void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  const size_t index = param_groups_.size();
  const auto& options = group.has_options() ? group.options() : defaults();
  const GroupSettings settings = rule_->checked_settings(options, index);
  optim::check_initial(settings);
  optim::check_params(group, settings, index, *rule_);
  KnownParams known = known_params(param_groups_);
  add_new_params(group, index, known);
  rule_->check_new(options);
  Optimizer::add_param_group(group);
  // torch 2.15 merges a group's options with the defaults. It can do so only for its own classes of
  // options, and drops those of other classes.
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
}

// torch's add_param_group, which is not virtual, does not check whether a parameter is known.
void FusedOptimizer::check_repeats() {
  if (number_of_params(param_groups_) == params_checked_) return;
  params_checked_ = known_params(param_groups_).size();
}

std::optional<FusedOptimizer::ScaledGradient> FusedOptimizer::first_gradient() const {
  using Weak = decltype(ScaledGradient::grad);
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined() || grad.is_inference()) continue;
      return ScaledGradient{param, Weak(grad.getIntrusivePtr()),
                            static_cast<uint32_t>(grad._version())};
    }
  }
  return std::nullopt;
}

// Warns if the program steps with the gradients of a scaler's step, which are still scaled.
void FusedOptimizer::warn_of_scaled_gradient() {
  const auto last = std::exchange(stepped_with_, std::nullopt);
  if (!last || grad_scale || found_inf) return;
  const at::Tensor& grad = last->param.grad();
  if (!grad.defined() || last->grad.lock() != grad.getIntrusivePtr()) return;
  if (grad._version() != last->version) return;
  TORCH_WARN(
      "optimizer.step() was called beside scaler.step(optimizer), with gradients that are still "
      "multiplied by the loss scale: call only scaler.step(optimizer)");
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  refuse_averaged("step");
  check_scalar("grad_scale", grad_scale);
  check_scalar("found_inf", found_inf);
  check_repeats();
  warn_of_scaled_gradient();
  const auto settings = checked_settings(param_groups_, max_grad_norm, *rule_);
  adopt_written_params();
  std::vector<GroupLists> groups;
  int64_t first_index = 0;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    groups.push_back(optim::read_group(param_groups_[i], settings[i], state_, *rule_, first_index));
  }
  if (number_of_calls(groups) > 1) {
    auto properties = checked_properties(groups);
    if (properties != checked_) check_before_writing(groups, *rule_);
    checked_ = std::move(properties);
  }
  grad_norm_ = max_grad_norm ? norm_tensor(grad_norm_, groups) : at::Tensor();
  step_groups(groups, *rule_, *this, grad_norm_, known_norms_);
  writes_after_step_ = param_writes();
  return loss;
}

at::Tensor FusedOptimizer::grad_norm() const {
  return max_grad_norm && grad_norm_.defined() ? grad_norm_.clone() : at::Tensor();
}

std::vector<at::Tensor> FusedOptimizer::master_params() const {
  refuse_averaged("master_params");
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> stepped;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* state = optim::find_state(state_, param);
      const at::Tensor master = state ? state->master_param() : at::Tensor();
      if (!master.defined()) {
        stepped.push_back(param);
      } else {
        stepped.push_back(optim::whole_master(param, master));
      }
    }
  }
  return stepped;
}

void FusedOptimizer::refuse_averaged(const char* method) const {
  TORCH_CHECK(!*is_averaged_, method,
              "(): the parameters are averages while the result of averaged() lives; destroy it "
              "first");
}

AveragedParams FusedOptimizer::averaged() {
  refuse_averaged("averaged");
  const c10::NoGradGuard no_grad;
  std::vector<AveragedParams::Swapped> swapped;
  bool has_ema = false;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    has_ema |= rule_->checked_settings(param_groups_[i].options(), i).has_ema;
    for (const at::Tensor& param : param_groups_[i].params()) {
      const FusedParamState* state = optim::find_state(state_, param);
      if (!state || !state->ema_param().defined()) continue;
      swapped.push_back({param, param.detach().clone()});
    }
  }
  TORCH_CHECK(has_ema, "averaged(): there are no averages; set for example ema(0.999)");
  // If a copy throws, its destructor restores the parameters.
  AveragedParams averaged(std::move(swapped), is_averaged_);
  *is_averaged_ = true;
  for (const auto& [param, own] : averaged.swapped_) {
    param.copy_(optim::find_state(state_, param)->ema_param());
  }
  return averaged;
}

AveragedParams::~AveragedParams() {
  if (!is_averaged_) return;  // moved from
  const c10::NoGradGuard no_grad;
  for (const auto& [param, own] : swapped_) {
    try {  // the parameter may have been replaced by one of another shape
      param.copy_(own);
    } catch (const c10::Error& error) {
      TORCH_WARN("averaged(): a parameter of shape ", param.sizes(),
                 " was not restored: ", error.what_without_backtrace());
    }
  }
  *is_averaged_ = false;
}

void FusedOptimizer::sync_masters_from_model() {
  refuse_averaged("sync_masters_from_model");
  const c10::NoGradGuard no_grad;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* state = optim::find_state(state_, param);
      if (!state || !state->master_param().defined()) continue;
      const at::Tensor& master = state->master_param();
      if (master.scalar_type() == at::kFloat) optim::adopt_param(param, master);
    }
  }
  writes_after_step_.reset();
}

FusedOptimizer::ParamWrites FusedOptimizer::param_writes() const {
  ParamWrites writes;
  for_each_float_master([&](const at::Tensor& param, const at::Tensor&) {
    ++writes.masters;
    writes.versions += param._version();
    writes.addresses = writes.addresses * 31 + reinterpret_cast<uintptr_t>(param.const_data_ptr());
  });
  return writes;
}

void FusedOptimizer::adopt_written_params() {
  const auto before = std::exchange(writes_after_step_, std::nullopt);
  if (are_on_gpu(param_groups_) && is_capturing()) return;
  warn_of_written_params();
  // ParamWrites can be compared only if the number of masters is the same.
  const ParamWrites now = param_writes();
  if (before && before->masters == now.masters && !(*before == now)) {
    std::vector<at::Tensor> written_over;
    for_each_float_master([&](const at::Tensor& param, const at::Tensor& master) {
      written_over.push_back(optim::adopt_param(param, master));
    });
    // A new copy is started only when the last one has arrived. If each step replaced it, the host
    // might never receive one.
    if (!written_over.empty() && !warned_ && !written_over_) {
      written_over_ = std::make_shared<HostCopy>();
      written_over_->send(largest(written_over, written_over[0].device()));
    }
  }
  warn_of_written_params();
}

void FusedOptimizer::warn_of_written_params() {
  const auto arrived = written_over_ ? written_over_->latest() : std::nullopt;
  if (!arrived) return;
  written_over_.reset();
  if (!arrived->item<bool>()) return;
  warned_ = true;
  TORCH_WARN(
      "parameters were written by code other than the optimizer since its last step. Their float "
      "masters were set to the written values, which have no more bits than the parameters. After "
      "loading a model call sync_masters_from_model(). This warning is given once");
}

void FusedOptimizer::for_each_float_master(
    const std::function<void(const at::Tensor&, const at::Tensor&)>& visit) const {
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* state = optim::find_state(state_, param);
      if (!state || !state->master_param().defined()) continue;
      if (!is_16bit(param.scalar_type())) continue;  // the model was cast, so the step is refused
      if (state->master_param().scalar_type() == at::kFloat) visit(param, state->master_param());
    }
  }
}

}  // namespace ampfuse
