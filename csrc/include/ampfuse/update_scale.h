#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>
#include <string>

namespace ampfuse {

/// The tensors of a loss scale, on one device. All are written.
struct ScaleTensors {
  at::Tensor scale;           ///< float, one element
  at::Tensor growth_tracker;  ///< int, one element: clean steps since the last overflow or growth
  at::Tensor counters;        ///< long, 3 elements: number of overflows until one lowers the scale
                              ///< (initially `hysteresis`), overflows in a row, updates
  /// Float, [n, 3]: for each of the last n updates the scale before it, 1 if the step has
  /// overflowed, 2 if it was skipped as an outlier (else 0), and `norm`. Update i is in row i mod
  /// n.
  std::optional<at::Tensor> history = std::nullopt;
  /// Double, 4 elements: the number of norms so far, the mean and variance of their logarithms, and
  /// the limit of the next one. Initially 0, 0, 0 and infinity.
  std::optional<at::Tensor> norms = std::nullopt;
};

/// The policy of update_scale, as in GradScalerOptions, and the norm that it records.
struct UpdateScaleOptions {
  double growth_factor = 2;        ///< factor by which the scale grows: finite, at least 1
  double backoff_factor = 0.5;     ///< factor by which it is lowered: more than 0, at most 1
  int64_t growth_interval = 2000;  ///< number of clean steps in a row after which the scale grows
  std::optional<double> min_scale = std::nullopt;  ///< lower limit of backing off, above 0
  std::optional<double> max_scale = std::nullopt;  ///< upper limit of growth, above 0
  int64_t hysteresis = 1;  ///< number of overflows after which the scale is lowered
  std::string hysteresis_refill = "growth";  ///< the event that restores the hysteresis: "growth"
                                             ///< of the scale, or any "clean_step"
  bool dynamic = true;                       ///< false: the scale never changes
  /// Standard deviations by which the logarithm of `norm` may be above its mean; with `norms`.
  std::optional<double> skip_outliers = std::nullopt;
  std::optional<at::Tensor> norm = std::nullopt;  ///< float, one element, for history and norms
};

/// Updates the loss scale once, on the device. With the default options the result has the same
/// bits as torch's `_amp_update_scale_`, except that the scale also grows if the growth interval
/// was already exceeded.
///
/// \param tensors See ScaleTensors.
/// \param found_infs The flags of the step: float, one element each. A nonzero one is an overflow.
/// \param options See UpdateScaleOptions.
AMPFUSE_API void update_scale(const ScaleTensors& tensors, at::TensorList found_infs,
                              const UpdateScaleOptions& options);

}  // namespace ampfuse
