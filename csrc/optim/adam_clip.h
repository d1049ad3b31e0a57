// What gradients are clipped by: norms over groups and devices.
#pragma once

#include "adam_lists.h"

namespace ampfuse::optim {

struct Clip {
  at::Tensor total_norm;  // of the gradients as they are, still scaled
  double max_norm;
  at::Tensor grad_norm;  // where the step leaves the norm of the unscaled ones; or undefined
};

struct Clips {
  std::vector<std::optional<Clip>> of_groups;
  std::optional<at::Tensor> found_inf;  // whether any gradient is not finite, if that was asked for
};

/// A group is clipped by its own norm where it has a limit, else by that of all others without, if
/// there is a `shared_limit`; then `grad_norm`, which is set to 0 when there are no such gradients,
/// goes with it. Norms are double: those of scaled gradients go beyond float where no element does.
/// `known_norms`: of all gradients of all groups, one for each device, if somebody has just
/// measured them; else empty.
Clips measure_clips(const std::vector<AdamGroup>& groups, std::optional<double> shared_limit,
                    const at::Tensor& grad_norm, bool find_inf,
                    const std::vector<at::Tensor>& known_norms);

}  // namespace ampfuse::optim
