// Groups the tensors of a step by their combination of dtypes, and selects a kernel of
// fused_step.cuh for each group.
#pragma once

#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "../ops/step_tensor.h"
#include "../tensors/float_dtypes.h"
#include "fused_step.cuh"

namespace ampfuse {

struct StepDtypeGroup {
  StepDtypes dtypes;
  std::vector<StepTensor> tensors;
};

/// Returns the groups in the order of their first tensor. Tensors without elements are included,
/// since their step counters are incremented too.
inline std::vector<StepDtypeGroup> group_by_dtypes(const std::vector<StepTensor>& tensors) {
  std::vector<StepDtypeGroup> groups;
  for (const StepTensor& tensor : tensors) {
    auto group = groups.begin();
    while (group != groups.end() && !(group->dtypes == tensor.dtypes)) ++group;
    if (group == groups.end()) group = groups.insert(group, {tensor.dtypes, {}});
    group->tensors.push_back(tensor);
  }
  return groups;
}

/// Calls run.operator()<StepTypes<…>>() for one of the numbers of moments that the rule knows.
template <typename Rule, typename param_t, typename grad_t, typename state_t, Master kMaster,
          typename Run>
void dispatch_moments(int moments, const Run& run) {
  const auto try_count = [&]<int kCount>() {
    // Without moments there is no dtype of moments, so the kernel exists for one of them only.
    using used_t = std::conditional_t<kCount == 0, float, state_t>;
    if constexpr (!std::is_same_v<used_t, int8_t> || kCount <= math::kMostCodedMoments) {
      if (kCount != moments) return;
      run.template operator()<StepTypes<Rule, param_t, grad_t, used_t, kMaster, kCount>>();
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (try_count.template operator()<Rule::kCounts[i]>(), ...);
  }(std::make_index_sequence<std::size(Rule::kCounts)>());
}

/// True if the step of these tensors is extended (StepTypes).
inline bool is_extended(const StepDtypes& dtypes, bool round_at_random) {
  const bool rounds = round_at_random && is_16bit(dtypes.param) && dtypes.master == kNoDtype;
  return rounds || dtypes.state == c10::ScalarType::Char || dtypes.ema != kNoDtype;
}

inline NumberType number_type(c10::ScalarType dtype) {
  if (dtype == kNoDtype) return NumberType::kNone;
  if (dtype == c10::ScalarType::Half) return NumberType::kHalf;
  return dtype == c10::ScalarType::BFloat16 ? NumberType::kBFloat16 : NumberType::kWide;
}

template <typename Rule, typename param_t, Master kMaster, typename Run>
void dispatch_grad_and_state(const StepDtypes& dtypes, bool is_extended, int moments,
                             const Run& run) {
  const auto with_grad = [&]<typename grad_t>() {
    if (dtypes.state == c10::ScalarType::BFloat16) {
      return dispatch_moments<Rule, param_t, grad_t, c10::BFloat16, kMaster>(moments, run);
    }
    if constexpr (std::is_same_v<grad_t, AnyType>) {
      if (dtypes.state == c10::ScalarType::Char) {
        return dispatch_moments<Rule, param_t, grad_t, int8_t, kMaster>(moments, run);
      }
    }
    dispatch_moments<Rule, param_t, grad_t, float, kMaster>(moments, run);
  };
  if (is_extended) return with_grad.template operator()<AnyType>();
  switch (dtypes.grad) {
    case c10::ScalarType::Half:
      return with_grad.template operator()<c10::Half>();
    case c10::ScalarType::BFloat16:
      return with_grad.template operator()<c10::BFloat16>();
    default:
      return with_grad.template operator()<float>();
  }
}

/// Calls run.operator()<StepTypes<…>>() for dtypes whose arithmetic is in acc_t.
template <typename Rule, typename acc_t, typename Run>
void dispatch_step(const StepDtypes& dtypes, bool is_extended, int moments, const Run& run) {
  if constexpr (std::is_same_v<acc_t, double>) {
    is_extended ? dispatch_moments<Rule, double, AnyType, double, Master::kNone>(moments, run)
                : dispatch_moments<Rule, double, double, double, Master::kNone>(moments, run);
  } else {
    const auto as = [&]<typename param_t, Master kMaster>() {
      dispatch_grad_and_state<Rule, param_t, kMaster>(dtypes, is_extended, moments, run);
    };
    if (dtypes.param == c10::ScalarType::Float)
      return as.template operator()<float, Master::kNone>();
    const bool is_fp16 = dtypes.param == c10::ScalarType::Half;
    switch (dtypes.master) {
      case kNoDtype:
        return is_fp16 ? as.template operator()<c10::Half, Master::kNone>()
                       : as.template operator()<c10::BFloat16, Master::kNone>();
      case c10::ScalarType::Float:
        return is_fp16 ? as.template operator()<c10::Half, Master::kFloat>()
                       : as.template operator()<c10::BFloat16, Master::kFloat>();
      default:
        return as.template operator()<uint16_t, Master::kRemainder>();
    }
  }
}

}  // namespace ampfuse
