#include "clip.h"

#include <ATen/ops/zeros.h>
#include <ampfuse/multi_tensor_norm.h>

#include <cmath>

#include "../tensors/device_scalars.h"

namespace ampfuse::optim {

namespace {

struct GradInspection {
  at::Tensor total_norm;
  at::Tensor found_inf;
};

// Inspects all gradients as one vector. The results are on the device of the first gradient.
GradInspection inspect(const std::vector<const GroupLists*>& groups) {
  std::vector<at::Tensor> grads;
  for (const GroupLists* group : groups) {
    for (const StepLists& lists : group->lists) {
      grads.insert(grads.end(), lists.grads.begin(), lists.grads.end());
    }
  }
  std::vector<at::Tensor> norms;
  std::vector<at::Tensor> flags;
  for (const DeviceTensors& part : by_device(grads)) {
    const MultiTensorNorm norm = multi_tensor_norm(part.tensors, /*ord=*/2, at::kDouble);
    norms.push_back(norm.total_norm);
    flags.push_back(norm.found_inf);
  }
  if (norms.empty()) return {at::zeros({}, at::kFloat), at::zeros({}, at::kFloat)};
  const at::Tensor found_inf = largest(flags, norms[0].device());
  return {joined_norm(std::move(norms)), found_inf};
}

}  // namespace

Clips inspect_for_clipping(const std::vector<GroupLists>& groups,
                           std::optional<double> shared_limit, const at::Tensor& grad_norm,
                           bool find_inf, const std::vector<at::Tensor>& known_norms) {
  // Known norms cover all gradients, so they are used only if all groups are inspected together.
  const auto inspect_groups = [&](const std::vector<const GroupLists*>& members) {
    const bool is_known = !known_norms.empty() && !find_inf && members.size() == groups.size();
    return is_known ? GradInspection{joined_norm(known_norms), {}} : inspect(members);
  };
  Clips clips = {std::vector<std::optional<Clip>>(groups.size()), std::nullopt};
  std::vector<const GroupLists*> sharing;
  std::vector<at::Tensor> flags;
  bool any_shared = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto limit = groups[i].settings.max_grad_norm;
    if (!limit) {
      sharing.push_back(&groups[i]);
      any_shared = any_shared || !groups[i].lists.empty();
    } else if (!groups[i].lists.empty() && (find_inf || !std::isinf(*limit))) {
      const GradInspection inspection = inspect_groups({&groups[i]});
      clips.of_groups[i] = {inspection.total_norm, *limit, {}};
      flags.push_back(inspection.found_inf);
    }
  }
  if (grad_norm.defined() && !any_shared) grad_norm.zero_();  // no step will write it
  if (any_shared && (shared_limit || find_inf)) {
    const GradInspection inspection = inspect_groups(sharing);
    flags.push_back(inspection.found_inf);
    for (size_t i = 0; i < groups.size() && shared_limit; ++i) {
      if (groups[i].settings.max_grad_norm) continue;
      clips.of_groups[i] = {inspection.total_norm, *shared_limit, grad_norm};
    }
  }
  if (find_inf && !flags.empty()) clips.found_inf = largest(flags, flags[0].device());
  return clips;
}

}  // namespace ampfuse::optim
