#pragma once

#include "../math/fused_sgd.h"
#include "fused_step.h"

namespace ampfuse {

using FusedSgdArguments = FusedRuleArguments<math::SgdRule>;

FusedSgdArguments fused_sgd_arguments(const NamedArguments& named);

}  // namespace ampfuse
