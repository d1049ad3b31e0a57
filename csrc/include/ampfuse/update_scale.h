#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>
#include <string>

namespace ampfuse {

/// What a loss scale consists of, on one device; all written.
struct ScaleTensors {
  at::Tensor scale;           ///< float, one element
  at::Tensor growth_tracker;  ///< int, one element: clean steps since the last overflow or growth
  at::Tensor counters;  ///< long: which overflow from here on backs off (start with `hysteresis`),
                        ///< skips in a row, updates
  std::optional<at::Tensor> history = std::nullopt;  ///< float, n × 3: of each of the last n
                                                     ///< updates the scale before it, 1 if it was
                                                     ///< skipped, `norm`; update i in row i mod n
};

struct UpdateScaleOptions {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  std::optional<double> min_scale = std::nullopt;  ///< where backing off ends
  std::optional<double> max_scale = std::nullopt;  ///< where growing ends
  int64_t hysteresis = 1;  ///< the overflow in this place of a row is the first to back off
  std::string hysteresis_refill = "growth";  ///< what starts the row anew: "growth" of the scale,
                                             ///< or any "clean_step"
  bool dynamic = true;                       ///< else the scale stays what it is
  std::optional<at::Tensor> norm = std::nullopt;  ///< float, one element, for the history
};

/// One update of the loss scale, decided on the device: any of `found_infs` (float, one element
/// each) that is not 0 is an overflow. With the defaults torch's `_amp_update_scale_`, bit by bit,
/// but that a growth interval which has been passed already is over.
AMPFUSE_API void update_scale(const ScaleTensors& tensors, at::TensorList found_infs,
                              const UpdateScaleOptions& options);

}  // namespace ampfuse
