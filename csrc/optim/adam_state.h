// What Adam keeps for a parameter: created at its first step, loaded, rebuilt.
#pragma once

#include "adam_settings.h"

namespace ampfuse::optim {

/// Creates what is missing of a parameter's state.
void ensure_state(AdamParamState& state, const at::Tensor& param, const AdamSettings& settings);

/// Takes over a saved state, whoever saved it, without moving tensors that are there already.
/// Dtypes are those of the settings. Masters are float: what becomes a remainder of them sets the
/// parameter too.
void load_state(AdamParamState& state, const AdamParamState& saved, const at::Tensor& param,
                const AdamSettings& settings);

/// The master of a parameter as it is. `dtype`: float, or short for a remainder, which is 0: a
/// bfloat16 number lacks no bits of its own.
at::Tensor new_master(const at::Tensor& param, at::ScalarType dtype);

/// A parameter's float master: what is kept, or what the parameter and a remainder stand for.
at::Tensor whole_master(const at::Tensor& param, const at::Tensor& master_param);

}  // namespace ampfuse::optim
