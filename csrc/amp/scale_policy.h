// Checks the options of a GradScaler, and converts them to those of the op update_scale. The source
// also compares and prints them.
#pragma once

#include <ampfuse/grad_scaler.h>
#include <ampfuse/update_scale.h>

namespace ampfuse::amp {

/// Throws for options out of range.
void check_options(const GradScalerOptions& options);

/// Checks as check_options() does, and throws for factors of 1, in torch's words, and for an
/// init_scale outside min_scale … max_scale. The constructor calls this.
void check_initial_options(const GradScalerOptions& options);

/// Throws unless `scale`, rounded to float, is finite and above 0.
void check_scale(const char* name, double scale);

/// Converts the options to those of the op update_scale.
UpdateScaleOptions update_options(const GradScalerOptions& options);

}  // namespace ampfuse::amp
