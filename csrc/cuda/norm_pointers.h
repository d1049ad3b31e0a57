#pragma once

#include "../ops/multi_tensor_norm.h"
#include "multi_tensor_interface.h"

namespace ampfuse {

/// Returns pointers to the outputs, with the flag in `found_inf`.
inline NormPointers pointers_to(const NormOutputs& outputs, const at::Tensor& found_inf,
                                bool clear_found_inf) {
  const auto& [total_norm, norms, unused, first_nonfinite, nonfinite_count] = outputs;
  return {total_norm.mutable_data_ptr(),
          norms.mutable_data_ptr(),
          total_norm.scalar_type() == at::kDouble,
          found_inf.mutable_data_ptr<float>(),
          clear_found_inf,
          first_nonfinite.mutable_data_ptr<int64_t>(),
          nonfinite_count.mutable_data_ptr<int64_t>()};
}

}  // namespace ampfuse
