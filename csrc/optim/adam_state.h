// What Adam keeps for a parameter: created at its first step, loaded, rebuilt.
#pragma once

#include "adam_checked_options.h"

namespace ampfuse::optim {

/// Creates what is missing of a parameter's state.
void ensure_state(AdamParamState& state, const at::Tensor& param, const AdamSettings& settings);

/// What a parameter's state becomes, and the parameter with it.
struct NewState {
  AdamParamState state;
  at::Tensor param;  // its master, to be rounded; undefined where the parameter stays
};

/// Makes new state of a saved one that fits the parameter, whoever saved it. Dtypes are those of
/// the settings; saved masters are float.
NewState new_state(const AdamParamState& saved, const at::Tensor& param,
                   const AdamSettings& settings);

/// Takes it over, without moving tensors that are there already.
void put_state(AdamParamState& there, const NewState& made, const at::Tensor& param);

/// The master of a parameter as it is. `dtype`: float, or short for a remainder, which is 0: a
/// bfloat16 number lacks no bits of its own.
at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype);

/// Has a float master take over the elements in which its parameter was written by somebody else,
/// and is not the master rounded any more. Returns whether there are any, 0-dim, on the device.
at::Tensor adopt_param(const at::Tensor& param, const at::Tensor& master);

/// A parameter's float master: what is kept, or what the parameter and a remainder stand for.
at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param);

}  // namespace ampfuse::optim
