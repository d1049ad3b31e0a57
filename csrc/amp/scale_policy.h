// The options of a scaler, checked.
#pragma once

#include <ampfuse/grad_scaler.h>
#include <ampfuse/update_scale.h>

namespace ampfuse::amp {

/// Refuses options that no scaler could make sense of, in torch's words where torch refuses them.
void check_options(const GradScalerOptions& options);

/// As the op takes them.
UpdateScaleOptions update_options(const GradScalerOptions& options);

}  // namespace ampfuse::amp
