// Norms for clipping gradients, over groups and devices.
#pragma once

#include "lists.h"

namespace ampfuse::optim {

struct Clip {
  at::Tensor total_norm;  // norm of the gradients as stored, still scaled
  double max_norm;
  at::Tensor grad_norm;  // receives the norm of the unscaled gradients; may be undefined
};

struct Clips {
  std::vector<std::optional<Clip>> of_groups;
  std::optional<at::Tensor> found_inf;  // not 0 if a gradient is non-finite; only with find_inf
};

/// A group with a limit is clipped by its own norm. All other groups are clipped by their joint
/// norm, if there is a `shared_limit`. The step then writes that norm, unscaled, to `grad_norm`; if
/// those groups have no gradients, this function writes 0. With `find_inf`, the gradients of all
/// groups are inspected for non-finite elements, also those of groups that are not clipped. Norms
/// are double: a norm of scaled gradients may exceed the range of float though no element does.
/// `known_norms` are the norms of all gradients of all groups, one per device, if the caller has
/// just inspected them; otherwise empty.
Clips inspect_for_clipping(const std::vector<GroupLists>& groups,
                           std::optional<double> shared_limit, const at::Tensor& grad_norm,
                           bool find_inf, const std::vector<at::Tensor>& known_norms);

}  // namespace ampfuse::optim
