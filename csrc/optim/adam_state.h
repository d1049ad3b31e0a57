// Creates, converts and stores the state that Adam keeps for a parameter.
#pragma once

#include "adam_options.h"

namespace ampfuse::optim {

/// Creates the missing tensors of a parameter's state.
void ensure_state(AdamParamState& state, const at::Tensor& param, const AdamSettings& settings);

struct NewState {
  AdamParamState state;
  at::Tensor param;  // the parameter's new value, of any dtype; undefined if it does not change
};

/// Converts saved state of any optimizer to state that fits the parameter. Dtypes are those of the
/// settings; saved masters are float.
NewState new_state(const AdamParamState& saved, const at::Tensor& param,
                   const AdamSettings& settings);

/// Stores new state and the new value. Existing tensors of the same dtype and shape keep their
/// memory.
void put_state(AdamParamState& existing, const NewState& made, const at::Tensor& param);

/// Returns a master that equals the parameter. `dtype` is float, or short for a remainder, which is
/// 0 because a bfloat16 parameter has no more bits.
at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype);

/// Copies to a float master the elements that other code wrote to its parameter: those that differ
/// from the rounded master. Returns whether there are any: a bool, 0-dim, on the parameter's
/// device.
at::Tensor adopt_param(const at::Tensor& param, const at::Tensor& master);

/// Returns a parameter's float master: the stored one, or the float that parameter and remainder
/// make up.
at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param);

}  // namespace ampfuse::optim
