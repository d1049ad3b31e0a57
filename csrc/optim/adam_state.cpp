#include "adam_state.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include "../tensors/float_dtypes.h"

namespace ampfuse {

// Steps are written as integers, as torch writes them, so that torch's AdamW can read them.
void AdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  const auto write = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) archive.write(name, torch::IValue(tensor));
  };
  archive.write("step", torch::IValue(step().defined() ? step().item<int64_t>() : 0));
  write("exp_avg", exp_avg());
  write("exp_avg_sq", exp_avg_sq());
  write("max_exp_avg_sq", max_exp_avg_sq());
  write("master_param", master_param());
}

void AdamParamState::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) {
    torch::IValue saved;
    return archive.try_read(name, saved) ? saved.toTensor() : at::Tensor();
  };
  torch::IValue taken;
  TORCH_CHECK_VALUE(archive.try_read("step", taken),
                    "loaded state dict: expected the state of Adam or AdamW, which has a step; is "
                    "this the archive of another optimizer?");
  step(taken.isTensor() ? taken.toTensor() : at::scalar_tensor(taken.toScalar(), at::kFloat));
  exp_avg(read("exp_avg"));
  exp_avg_sq(read("exp_avg_sq"));
  max_exp_avg_sq(read("max_exp_avg_sq"));
  master_param(read("master_param"));
}

namespace optim {

namespace {

// Moments of double and complex parameters have the parameter's dtype.
at::ScalarType moment_dtype(const at::Tensor& param, const AdamSettings& settings) {
  const at::ScalarType dtype = param.scalar_type();
  return is_16bit(dtype) || dtype == at::kFloat ? settings.state_dtype : dtype;
}

// Returns nullopt if the parameter needs no master.
std::optional<at::ScalarType> master_dtype(const at::Tensor& param, const AdamSettings& settings) {
  if (!is_16bit(param.scalar_type()) || settings.master_weights == MasterWeights::kOff) {
    return std::nullopt;
  }
  return settings.master_weights == MasterWeights::kRemainder ? at::kShort : at::kFloat;
}

void ensure_moment(at::Tensor& moment, const at::Tensor& param, at::ScalarType dtype) {
  if (moment.defined()) return;
  moment = at::zeros_like(param, param.options().dtype(dtype), at::MemoryFormat::Preserve);
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

struct SplitTensor {
  at::Tensor bfloat16;
  at::Tensor remainder;
};

// Splits floats as the kernels do (math/fused_adam_remainder.h).
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
  // A remainder must not turn a number into a NaN (math/fused_adam_remainder.h).
  return at::where(joined.isnan() & ~param.isnan(), upper.view(at::kFloat), joined);
}

void ensure_state(AdamParamState& state, const at::Tensor& param, const AdamSettings& settings) {
  if (!state.step().defined()) state.step(at::zeros({}, param.options().dtype(at::kFloat)));
  ensure_moment(state.exp_avg(), param, moment_dtype(param, settings));
  // All moments have one dtype, even if `state_dtype` was changed after the first step.
  const at::ScalarType dtype = state.exp_avg().scalar_type();
  ensure_moment(state.exp_avg_sq(), param, dtype);
  if (settings.amsgrad) ensure_moment(state.max_exp_avg_sq(), param, dtype);
  const auto of_master = master_dtype(param, settings);
  if (of_master && !state.master_param().defined()) {
    state.master_param(new_master(param, *of_master));
  }
}

NewState new_state(const AdamParamState& saved, const at::Tensor& param,
                   const AdamSettings& settings) {
  NewState made;
  const auto counter = param.options().dtype(at::kFloat);
  made.state.step(at::empty({}, counter).copy_(saved.step().reshape({})));
  const at::ScalarType dtype = moment_dtype(param, settings);
  made.state.exp_avg(converted(saved.exp_avg(), param, dtype));
  made.state.exp_avg_sq(converted(saved.exp_avg_sq(), param, dtype));
  made.state.max_exp_avg_sq(converted(saved.max_exp_avg_sq(), param, dtype));
  at::Tensor master = saved.master_param();
  if (!master.defined()) return made;
  const auto of_master = master_dtype(param, settings);
  if (of_master || !is_16bit(param.scalar_type())) made.param = master;
  if (!of_master) return made;
  if (*of_master == at::kShort) {
    const SplitTensor split = split_master(master.to(param.device(), at::kFloat));
    made.param = split.bfloat16;
    master = split.remainder;
  }
  made.state.master_param(converted(master, param, *of_master));
  return made;
}

void put_state(AdamParamState& existing, const NewState& made, const at::Tensor& param) {
  put(existing.step(), made.state.step());
  put(existing.exp_avg(), made.state.exp_avg());
  put(existing.exp_avg_sq(), made.state.exp_avg_sq());
  put(existing.max_exp_avg_sq(), made.state.max_exp_avg_sq());
  put(existing.master_param(), made.state.master_param());
  if (made.param.defined()) param.copy_(made.param);
}

}  // namespace optim

}  // namespace ampfuse
