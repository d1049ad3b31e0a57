#include "adam_state.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

namespace ampfuse {

// Steps are written as torch writes them, as a number, so that torch's AdamW can read them.
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
  archive.read("step", taken);
  step(taken.isTensor() ? taken.toTensor() : at::scalar_tensor(taken.toScalar(), at::kFloat));
  exp_avg(read("exp_avg"));
  exp_avg_sq(read("exp_avg_sq"));
  max_exp_avg_sq(read("max_exp_avg_sq"));
  master_param(read("master_param"));
}

namespace optim {

namespace {

bool is_half(const at::Tensor& param) {
  return param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
}

// What is more precise than float stays as it is.
at::ScalarType moment_dtype(const at::Tensor& param, const AdamSettings& settings) {
  const bool is_float = is_half(param) || param.scalar_type() == at::kFloat;
  return is_float ? settings.state_dtype : param.scalar_type();
}

// None where a parameter needs no master.
std::optional<at::ScalarType> master_dtype(const at::Tensor& param, const AdamSettings& settings) {
  if (!is_half(param) || settings.master_weights == MasterWeights::kOff) return std::nullopt;
  return settings.master_weights == MasterWeights::kRemainder ? at::kShort : at::kFloat;
}

void ensure_moment(at::Tensor& moment, const at::Tensor& param, const AdamSettings& settings) {
  if (moment.defined()) return;
  moment = at::zeros_like(param, param.options().dtype(moment_dtype(param, settings)),
                          at::MemoryFormat::Preserve);
}

// Undefined where nothing was saved.
void put(at::Tensor& there, const at::Tensor& saved, const at::Tensor& param,
         at::ScalarType dtype) {
  if (!saved.defined()) {
    there.reset();
    return;
  }
  if (!there.defined() || there.scalar_type() != dtype || there.sizes() != param.sizes()) {
    there = at::empty_like(param, param.options().dtype(dtype), at::MemoryFormat::Preserve);
  }
  there.copy_(saved);
}

struct SplitTensor {
  at::Tensor bfloat16;
  at::Tensor remainder;
};

// As the kernels split floats (math/remainder.h).
SplitTensor split_master(const at::Tensor& master) {
  const at::Tensor bits = master.contiguous().view(at::kInt);
  // Wraps around at the top of the negative NaNs, which the other branch is for.
  const at::Tensor nearest = at::bitwise_right_shift(bits + 0x8000, 16);
  const at::Tensor quiet_nan = at::bitwise_right_shift(bits, 16) | 0x40;
  const at::Tensor upper = at::where(master.isnan(), quiet_nan, nearest);
  return {upper.to(at::kShort).view(at::kBFloat16), bits.to(at::kShort)};
}

void put_master(AdamParamState& state, const at::Tensor& saved, const at::Tensor& param,
                const AdamSettings& settings) {
  const auto dtype = master_dtype(param, settings);
  at::Tensor& there = state.master_param();
  if (!dtype || !saved.defined()) {
    there.reset();
  } else if (*dtype == at::kShort) {
    const SplitTensor split = split_master(saved.to(param.device(), at::kFloat));
    param.copy_(split.bfloat16);
    put(there, split.remainder, param, *dtype);
  } else {
    put(there, saved, param, *dtype);
  }
}

}  // namespace

at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype) {
  if (dtype == at::kShort) {
    return at::zeros_like(param, param.options().dtype(dtype), at::MemoryFormat::Preserve);
  }
  return param.detach().to(dtype, /*non_blocking=*/false, /*copy=*/false,
                           at::MemoryFormat::Preserve);
}

at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param) {
  if (master_param.scalar_type() != at::kShort) return master_param;
  const at::Tensor upper =
      at::bitwise_left_shift(param.detach().contiguous().view(at::kShort).to(at::kInt), 16);
  const at::Tensor lower = master_param.contiguous().to(at::kInt);
  // A negative remainder brings its own sign bits, which is to borrow from the upper half.
  return at::where(param.isnan(), upper | (lower & 0xffff), upper + lower).view(at::kFloat);
}

void ensure_state(AdamParamState& state, const at::Tensor& param, const AdamSettings& settings) {
  if (!state.step().defined()) state.step(at::zeros({}, param.options().dtype(at::kFloat)));
  ensure_moment(state.exp_avg(), param, settings);
  ensure_moment(state.exp_avg_sq(), param, settings);
  if (settings.amsgrad) ensure_moment(state.max_exp_avg_sq(), param, settings);
  const auto of_master = master_dtype(param, settings);
  if (of_master && !state.master_param().defined()) {
    state.master_param(new_master(param, *of_master));
  }
}

void load_state(AdamParamState& state, const AdamParamState& saved, const at::Tensor& param,
                const AdamSettings& settings) {
  if (!state.step().defined()) state.step(at::zeros({}, param.options().dtype(at::kFloat)));
  state.step().copy_(saved.step().reshape({}));
  const at::ScalarType dtype = moment_dtype(param, settings);
  put(state.exp_avg(), saved.exp_avg(), param, dtype);
  put(state.exp_avg_sq(), saved.exp_avg_sq(), param, dtype);
  put(state.max_exp_avg_sq(), saved.max_exp_avg_sq(), param, dtype);
  put_master(state, saved.master_param(), param, settings);
}

}  // namespace optim

}  // namespace ampfuse
