#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <optional>

#include "../math/fused_adam.h"
#include "named_values.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kFusedAdam = "fused_adam";

/// A tensor list that stays on the dispatcher's stack. A copy would increment reference counts,
/// which takes Python's lock for tensors that Python also owns.
using TensorRefs = c10::ArrayRef<c10::IValue>;

struct FusedAdamArguments {
  std::array<TensorRefs, math::kAdamColumns> columns;  // an optional column may be empty
  TensorRefs state_steps;
  at::Tensor lr;
  math::AdamOptions options;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> total_norm;
  double max_norm;  // 0 without total_norm
  std::optional<at::Tensor> grad_norm;

  size_t count() const { return columns[math::kParam].size(); }
  bool has(int column) const { return !columns[column].empty(); }
  const at::Tensor& tensor(int column, size_t t) const { return columns[column][t].toTensor(); }
  bool is_written(int column) const { return column != math::kGrad || options.write_back_grads; }
};

/// Reads the arguments. Checks numbers, scalars and the lengths of lists; check_adam_tensor()
/// checks the tensors in the lists.
FusedAdamArguments fused_adam_arguments(const NamedArguments& arguments);

/// Returns the column's name in messages.
const char* adam_column_name(int column);

/// Throws if the tensors at index `t` of the columns do not fit together.
void check_adam_tensor(const FusedAdamArguments& arguments, size_t t);

void fused_adam_cuda(const FusedAdamArguments& arguments);

}  // namespace ampfuse
