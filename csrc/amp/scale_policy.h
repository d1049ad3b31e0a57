// The options of a scaler, checked.
#pragma once

#include <ampfuse/grad_scaler.h>
#include <ampfuse/update_scale.h>

namespace ampfuse::amp {

/// Refuses options that no scaler could make sense of.
void check_options(const GradScalerOptions& options);

/// Refuses also factors that change nothing, in torch's words, whose constructor does, too.
void check_first_options(const GradScalerOptions& options);

/// Refuses what no float scale can be.
void check_scale(const char* name, double scale);

/// As the op takes them.
UpdateScaleOptions update_options(const GradScalerOptions& options);

}  // namespace ampfuse::amp
