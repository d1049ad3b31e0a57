#include "state.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include "../ops/coded_moment.h"
#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"

namespace ampfuse {

// Steps are written as integers, as torch writes them, so that torch's optimizers can read them.
void FusedParamState::serialize(torch::serialize::OutputArchive& archive) const {
  const auto write = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) archive.write(name, torch::IValue(tensor));
  };
  archive.write("step", torch::IValue(step().defined() ? step().item<int64_t>() : 0));
  if (has_started()) {
    const auto copy = clone();  // shares the tensors
    for (const Moment& moment : static_cast<FusedParamState&>(*copy).moments()) {
      write(moment.tensor_name(), moment.tensor);
      if (moment.has_codes()) write(moment.units_name(), *moment.units);
    }
  }
  write("master_param", master_param());
  write("ema_param", ema_param());
}

void FusedParamState::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const std::string& name) {
    torch::IValue saved;
    return archive.try_read(name, saved) ? saved.toTensor() : at::Tensor();
  };
  torch::IValue taken;
  if (archive.try_read("step", taken)) {
    step(taken.isTensor() ? taken.toTensor() : at::scalar_tensor(taken.toScalar(), at::kFloat));
  }
  for (const Moment& moment : moments()) {
    if (moment.units) *moment.units = read(moment.units_name());
    moment.tensor = read(moment.tensor_name());
  }
  master_param(read("master_param"));
  ema_param(read("ema_param"));
}

namespace optim {

namespace {

// Returns the dtype of a moment as a number. Those of double and complex parameters have the
// parameter's dtype.
at::ScalarType moment_dtype(const at::Tensor& param, const GroupSettings& settings) {
  const at::ScalarType dtype = param.scalar_type();
  if (!is_16bit(dtype) && dtype != at::kFloat) return dtype;
  return settings.moment_dtype == at::kChar ? at::kFloat : settings.moment_dtype;
}

// Returns nullopt if the parameter needs no master.
std::optional<at::ScalarType> master_dtype(const at::Tensor& param, const GroupSettings& settings) {
  if (!is_16bit(param.scalar_type()) || settings.master_weights == MasterWeights::kOff ||
      settings.master_weights == MasterWeights::kStochastic) {
    return std::nullopt;
  }
  return settings.master_weights == MasterWeights::kRemainder ? at::kShort : at::kFloat;
}

at::Tensor zeros_like(const at::Tensor& param, at::ScalarType dtype) {
  return at::zeros_like(param, param.options().dtype(dtype), at::MemoryFormat::Preserve);
}

// Sets a moment, as codes and units or as a number.
void set_moment(const FusedParamState::Moment& moment, const at::Tensor& number, bool is_signed,
                bool as_codes) {
  if (as_codes) {
    const CodedMoment coded = encode_moment(number, is_signed);
    moment.tensor = coded.codes;
    *moment.units = coded.units;
  } else {
    moment.tensor = number;
    if (moment.units) moment.units->reset();
  }
}

// Returns the dtype of a parameter's average.
at::ScalarType ema_dtype(const at::Tensor& param, const GroupSettings& settings) {
  const at::ScalarType dtype = param.scalar_type();
  return is_16bit(dtype) || dtype == at::kFloat ? settings.ema_dtype : dtype;
}

// Creates the average, with the value that the next step changes, or deletes it.
void ensure_ema(FusedParamState& state, const at::Tensor& param, const GroupSettings& settings) {
  if (!settings.has_ema) {
    state.ema_param({});
  } else if (!state.ema_param().defined()) {
    const at::Tensor& master = state.master_param();
    const at::Tensor stepped = master.defined() ? whole_master(param, master) : param.detach();
    state.ema_param(stepped.to(ema_dtype(param, settings), /*non_blocking=*/false, /*copy=*/true,
                               at::MemoryFormat::Preserve));
  }
}

// Returns a copy with the memory layout of the parameter, or undefined if nothing was saved.
at::Tensor converted(const at::Tensor& saved, const at::Tensor& param, at::ScalarType dtype) {
  if (!saved.defined()) return {};
  const auto options = param.options().dtype(dtype);
  return at::empty_like(param, options, at::MemoryFormat::Preserve).copy_(saved);
}

// Copies the value into the existing tensor if shape and dtype agree: a captured CUDA graph may
// write that tensor.
void put(at::Tensor& existing, const at::Tensor& value) {
  if (existing.defined() && value.defined() && existing.scalar_type() == value.scalar_type() &&
      existing.sizes() == value.sizes()) {
    existing.copy_(value);
  } else {
    existing = value;
  }
}

// Throws if a moment was made for another dtype or shape of the parameter.
void check_is_of(const FusedParamState::Moment& moment, const at::Tensor& param) {
  const at::Tensor& tensor = moment.tensor;
  if (!tensor.defined()) return;
  if (moment.has_codes()) return;  // the operator checks codes
  const auto is_double = [](const at::Tensor& of) {
    return c10::toRealValueType(of.scalar_type()) == at::kDouble;
  };
  TORCH_CHECK_TYPE(
      is_double(tensor) == is_double(param) && tensor.is_complex() == param.is_complex(),
      "a parameter of shape ", param.sizes(), " is ", dtype_name(param.scalar_type()),
      " now, but its ", moment.name, " is ", dtype_name(tensor.scalar_type()),
      ". If the model was cast after a step, cast it back, or make a new optimizer");
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), "a parameter has shape ", param.sizes(),
                    " now, but its ", moment.name, " has ", tensor.sizes(),
                    ". If the parameter was replaced after a step, make a new optimizer");
}

struct SplitTensor {
  at::Tensor bfloat16;
  at::Tensor remainder;
};

// Splits floats as the kernels do (math/split_float.h).
SplitTensor split_master(const at::Tensor& master) {
  const at::Tensor bits = master.contiguous().view(at::kInt);
  // The sum wraps around only for NaN patterns, for which `nearest` is not used.
  const at::Tensor nearest = at::bitwise_right_shift(bits + 0x8000, 16);
  const at::Tensor quiet_nan = at::bitwise_right_shift(bits, 16) | 0x40;
  const at::Tensor upper = at::where(master.isnan(), quiet_nan, nearest);
  return {upper.to(at::kShort).view(at::kBFloat16), bits.to(at::kShort)};
}

}  // namespace

at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype) {
  if (dtype == at::kShort) {
    return at::zeros_like(param, param.options().dtype(dtype), at::MemoryFormat::Preserve);
  }
  return param.detach().to(dtype, /*non_blocking=*/false, /*copy=*/false,
                           at::MemoryFormat::Preserve);
}

at::Tensor number_of(const FusedParamState::Moment& moment) {
  return moment.has_codes() ? decode_moment(moment.tensor, *moment.units) : moment.tensor;
}

at::Tensor adopt_param(const at::Tensor& param, const at::Tensor& master) {
  const at::Tensor rounded = master.to(param.scalar_type());
  const at::Tensor both_nan = rounded.isnan() & param.isnan();
  const at::Tensor is_written_over = rounded.ne(param) & both_nan.logical_not();
  master.copy_(at::where(is_written_over, param.detach().to(at::kFloat), master));
  return is_written_over.any();
}

at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param) {
  if (master_param.scalar_type() != at::kShort) return master_param;
  const at::Tensor bits = param.detach().contiguous().view(at::kShort).to(at::kInt);
  const at::Tensor upper = at::bitwise_left_shift(bits, 16);
  const at::Tensor lower = master_param.contiguous().to(at::kInt);
  // A negative remainder is sign-extended, so that adding it borrows from the upper half.
  const at::Tensor joined =
      at::where(param.isnan(), upper | (lower & 0xffff), upper + lower).view(at::kFloat);
  // A remainder must not turn a number into a NaN (math/split_float.h).
  return at::where(joined.isnan() & ~param.isnan(), upper.view(at::kFloat), joined);
}

FusedParamState* find_state(const StateMap& states, const at::Tensor& param) {
  const auto found = states.find(param.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : static_cast<FusedParamState*>(found->second.get());
}

FusedParamState* ensure_state(StateMap& states, const at::Tensor& param,
                              const GroupSettings& settings, const OptimizerRule& rule) {
  const auto of_master = master_dtype(param, settings);
  FusedParamState* state = find_state(states, param);
  if (!state && !settings.counts_steps() && !of_master) return nullptr;
  if (!state) {
    auto made = rule.new_state();
    state = made.get();
    states[param.unsafeGetTensorImpl()] = std::move(made);
  }
  const auto moments = state->moments();
  // Steps are counted from the first moment on: the momentum of SGD may be switched on later. But
  // the first step sets an average, so an average keeps its counter. The momentum then starts from
  // 0, and its first step differs from torch's only by the dampening of the gradient.
  const bool starts =
      settings.moments > 0 && !moments[0].tensor.defined() && !state->ema_param().defined();
  if (starts || !state->step().defined()) {
    state->step(at::zeros({}, param.options().dtype(at::kFloat)));
  }
  for (size_t i = 0; i < settings.moments; ++i) {
    if (settings.is_coded() != moments[i].has_codes() || !moments[i].tensor.defined()) {
      // Between numbers and 8 bits moments are converted. Otherwise all moments keep the dtype of
      // the first, even if the option was changed after the first step.
      const at::ScalarType dtype = i > 0 && !settings.is_coded() ? moments[0].tensor.scalar_type()
                                                                 : moment_dtype(param, settings);
      const at::Tensor number = number_of(moments[i]);
      set_moment(moments[i], number.defined() ? number.to(dtype) : zeros_like(param, dtype), i == 0,
                 settings.is_coded());
    }
  }
  TORCH_CHECK_TYPE(!state->master_param().defined() || is_16bit(param.scalar_type()),
                   "a parameter of shape ", param.sizes(), " has a master, but it is ",
                   dtype_name(param.scalar_type()),
                   " now. If the model was cast after a step, "
                   "cast it back, or make a new optimizer");
  if (of_master && !state->master_param().defined()) {
    state->master_param(new_master(param, *of_master));
  }
  for (const auto& moment : moments) check_is_of(moment, param);
  ensure_ema(*state, param, settings);
  return state;
}

NewState new_state(FusedParamState& saved, const at::Tensor& param, const GroupSettings& settings,
                   const OptimizerRule& rule) {
  NewState made = {rule.new_state(), {}};
  FusedParamState& state = *made.state;
  const auto counter = param.options().dtype(at::kFloat);
  state.step(at::empty({}, counter).copy_(saved.step().reshape({})));
  const auto moments = state.moments();
  const auto saved_moments = saved.moments();
  bool has_moments = false;
  for (size_t i = 0; i < moments.size(); ++i) {
    const FusedParamState::Moment& moment = saved_moments[i];
    if (!moment.tensor.defined()) continue;
    has_moments = true;
    const bool as_codes = settings.moment_dtype == at::kChar && moment.units != nullptr;
    if (as_codes && moment.has_codes() && moment.tensor.strides() == param.strides()) {
      moments[i].tensor = converted(moment.tensor, param, moment.tensor.scalar_type());
      *moments[i].units = moment.units->to(param.device());
      continue;
    }
    set_moment(moments[i], converted(number_of(moment), param, moment_dtype(param, settings)),
               i == 0, as_codes);
  }
  if (settings.has_ema) {
    state.ema_param(converted(saved.ema_param(), param, ema_dtype(param, settings)));
  }
  at::Tensor master = saved.master_param();
  const auto of_master = master.defined() ? master_dtype(param, settings) : std::nullopt;
  if (master.defined() && (of_master || !is_16bit(param.scalar_type()))) made.param = master;
  if (of_master == at::kShort) {
    const SplitTensor split = split_master(master.to(param.device(), at::kFloat));
    made.param = split.bfloat16;
    master = split.remainder;
  }
  if (of_master) state.master_param(converted(master, param, *of_master));
  if (!has_moments && !settings.counts_steps() && !of_master) made.state.reset();
  return made;
}

void put_state(StateMap& states, NewState made, const at::Tensor& param) {
  if (made.param.defined()) param.copy_(made.param);
  FusedParamState* const existing = find_state(states, param);
  if (!made.state) {
    states.erase(param.unsafeGetTensorImpl());
  } else if (!existing) {
    states[param.unsafeGetTensorImpl()] = std::move(made.state);
  } else {
    put(existing->step(), made.state->step());
    const auto present = existing->moments();
    const auto moments = made.state->moments();
    for (size_t i = 0; i < moments.size(); ++i) {
      put(present[i].tensor, moments[i].tensor);
      if (moments[i].units) put(*present[i].units, *moments[i].units);
    }
    put(existing->master_param(), made.state->master_param());
    put(existing->ema_param(), made.state->ema_param());
  }
}

}  // namespace optim

}  // namespace ampfuse
