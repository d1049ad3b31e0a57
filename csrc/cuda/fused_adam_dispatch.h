// Groups the tensors of a step by their combination of dtypes, and selects a kernel of
// fused_adam.cuh for each group.
#pragma once

#include <vector>

#include "../ops/fused_adam_tensors.h"
#include "fused_adam.cuh"

namespace ampfuse {

struct AdamDtypeGroup {
  AdamDtypes dtypes;
  std::vector<AdamTensor> tensors;
};

/// Returns the groups in the order of their first tensor. Tensors without elements are included,
/// since their step counters are incremented too.
inline std::vector<AdamDtypeGroup> group_by_dtypes(const std::vector<AdamTensor>& tensors) {
  std::vector<AdamDtypeGroup> groups;
  for (const AdamTensor& tensor : tensors) {
    auto group = groups.begin();
    while (group != groups.end() && !(group->dtypes == tensor.dtypes)) ++group;
    if (group == groups.end()) group = groups.insert(group, {tensor.dtypes, {}});
    group->tensors.push_back(tensor);
  }
  return groups;
}

template <typename param_t, Master kMaster, typename Run>
void dispatch_grad_and_state(const AdamDtypes& dtypes, bool amsgrad, const Run& run) {
  const auto with_max = [&]<typename grad_t, typename state_t>() {
    amsgrad ? run.template operator()<AdamTypes<param_t, grad_t, state_t, kMaster, true>>()
            : run.template operator()<AdamTypes<param_t, grad_t, state_t, kMaster, false>>();
  };
  const auto with_state = [&]<typename grad_t>() {
    dtypes.state == at::kBFloat16 ? with_max.template operator()<grad_t, c10::BFloat16>()
                                  : with_max.template operator()<grad_t, float>();
  };
  switch (dtypes.grad) {
    case at::kHalf:
      return with_state.template operator()<c10::Half>();
    case at::kBFloat16:
      return with_state.template operator()<c10::BFloat16>();
    default:
      return with_state.template operator()<float>();
  }
}

/// Calls run.operator()<AdamTypes<…>>() for dtypes whose arithmetic is in acc_t.
template <typename acc_t, typename Run>
void dispatch_adam(const AdamDtypes& dtypes, bool amsgrad, const Run& run) {
  if constexpr (std::is_same_v<acc_t, double>) {
    amsgrad ? run.template operator()<AdamTypes<double, double, double, Master::kNone, true>>()
            : run.template operator()<AdamTypes<double, double, double, Master::kNone, false>>();
  } else {
    if (dtypes.param == at::kFloat) {
      return dispatch_grad_and_state<float, Master::kNone>(dtypes, amsgrad, run);
    }
    const bool is_fp16 = dtypes.param == at::kHalf;
    switch (dtypes.master) {
      case at::ScalarType::Undefined:
        return is_fp16
                   ? dispatch_grad_and_state<c10::Half, Master::kNone>(dtypes, amsgrad, run)
                   : dispatch_grad_and_state<c10::BFloat16, Master::kNone>(dtypes, amsgrad, run);
      case at::kFloat:
        return is_fp16
                   ? dispatch_grad_and_state<c10::Half, Master::kFloat>(dtypes, amsgrad, run)
                   : dispatch_grad_and_state<c10::BFloat16, Master::kFloat>(dtypes, amsgrad, run);
      default:
        return dispatch_grad_and_state<uint16_t, Master::kRemainder>(dtypes, amsgrad, run);
    }
  }
}

}  // namespace ampfuse
