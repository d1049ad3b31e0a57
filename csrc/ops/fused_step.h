// The arguments that the operators of all fused optimizers have, and their checks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <optional>

#include "../math/coded_moment.h"
#include "../math/fused_step.h"
#include "../math/stochastic_rounding.h"
#include "named_values.h"

namespace ampfuse {

/// A tensor list that stays on the dispatcher's stack. A copy would increment reference counts,
/// which takes Python's lock for tensors that Python also owns.
using TensorRefs = c10::ArrayRef<c10::IValue>;

/// The names of an operator.
struct StepNames {
  const char* op;
  std::array<const char*, math::kMostMoments> moments;  // of its lists of moments; null: no more
};

struct FusedStepArguments {
  const StepNames* names;
  std::array<TensorRefs, math::kMostColumns> columns;  // an optional column may be empty
  TensorRefs state_steps;                              // may be empty if nothing counts steps
  c10::ArrayRef<c10::IValue> first_indices;            // empty: consecutive
  at::Tensor lr;
  math::StepOptions options;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> total_norm;
  double max_norm;  // 0 without total_norm
  std::optional<at::Tensor> grad_norm;

  size_t count() const { return columns[math::kParam].size(); }
  bool has(int column) const { return !columns[column].empty(); }
  bool has_steps() const { return !state_steps.empty(); }
  /// True if moments are in 8 bits.
  bool is_coded() const { return has(math::kFirstUnit); }
  const at::Tensor& tensor(int column, size_t t) const { return columns[column][t].toTensor(); }
  const at::Tensor& step(size_t t) const { return state_steps[t].toTensor(); }
  bool is_written(int column) const { return column != math::kGrad || options.write_back_grads; }
  const char* column_name(int column) const;
};

/// The arguments of one optimizer's operator.
template <typename Rule>
struct FusedRuleArguments : FusedStepArguments {
  static_assert(math::kIsRule<Rule>);
  typename Rule::Options rule_options;
  int moments;  // the number of moments in use
};

/// Reads the arguments that all optimizers have, of which `moments` lists are in use, and checks
/// scalars and the lengths of lists. check_step_tensor() checks the tensors in the lists.
FusedStepArguments fused_step_arguments(const NamedArguments& named, const StepNames& names,
                                        int moments);

/// Throws a ValueError unless a number is in range, a text that says what is expected.
void check_step_number(const StepNames& names, const char* name, double value, bool in_range,
                       const char* range);

/// Returns the number of units of a coded moment with this many elements.
template <typename Size>
Size number_of_units(const Size& elements) {
  return (elements + (math::kCodeGroup - 1)) / math::kCodeGroup;
}

/// Throws if the tensors at index `t` of the columns do not fit together.
void check_step_tensor(const FusedStepArguments& arguments, size_t t);

/// Throws unless the lists are empty: the kernel for sparse tensors, and for devices that this
/// build does not support.
void refuse_step_backend(const FusedStepArguments& arguments);

}  // namespace ampfuse
