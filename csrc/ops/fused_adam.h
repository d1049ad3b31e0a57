#pragma once

#include "../math/fused_adam.h"
#include "fused_step.h"

namespace ampfuse {

using FusedAdamArguments = FusedRuleArguments<math::AdamRule>;

FusedAdamArguments fused_adam_arguments(const NamedArguments& named);

}  // namespace ampfuse
