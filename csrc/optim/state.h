// Creates, converts and stores the state that a fused optimizer keeps for a parameter.
#pragma once

#include "rule.h"

namespace ampfuse::optim {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Returns the state of a parameter, or null before its first step, and if it needs none.
FusedParamState* find_state(const StateMap& states, const at::Tensor& param);

/// Returns the state of a parameter with the tensors that a step needs, and creates the missing
/// ones. Returns null if the step needs none.
FusedParamState* ensure_state(StateMap& states, const at::Tensor& param,
                              const GroupSettings& settings, const OptimizerRule& rule);

struct NewState {
  std::unique_ptr<FusedParamState> state;  // null if it needs no moments, step or master
  at::Tensor param;  // the parameter's new value, of any dtype; undefined if it does not change
};

/// Converts saved state of any optimizer to state that fits the parameter. Dtypes are those of the
/// settings; saved masters are float.
NewState new_state(FusedParamState& saved, const at::Tensor& param, const GroupSettings& settings,
                   const OptimizerRule& rule);

/// Stores new state and the new value. Existing tensors of the same dtype and shape keep their
/// memory.
void put_state(StateMap& states, NewState made, const at::Tensor& param);

/// Returns a master that equals the parameter. `dtype` is float, or short for a remainder, which is
/// 0 because a bfloat16 parameter has no more bits.
at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype);

/// Returns a moment as numbers: decoded if it has units. Undefined if it is not there.
at::Tensor number_of(const FusedParamState::Moment& moment);

/// Copies to a float master the elements that other code wrote to its parameter: those that differ
/// from the rounded master. Returns whether there are any: a bool, 0-dim, on the parameter's
/// device.
at::Tensor adopt_param(const at::Tensor& param, const at::Tensor& master);

/// Returns a parameter's float master: the stored one, or the float that parameter and remainder
/// make up.
at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param);

}  // namespace ampfuse::optim
