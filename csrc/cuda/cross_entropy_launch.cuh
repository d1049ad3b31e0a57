// Functions that the launches of a cross-entropy share.
#pragma once

#include "../tensors/variant.h"
#include "cross_entropy_interface.h"
#include "cross_entropy_teams.cuh"
#include "dispatch.cuh"
#include "stream.cuh"

namespace ampfuse {

/// Calls run.operator()<grad_t>() with the type of the gradient, even if none is asked for: the
/// type of the logits, or a 16-bit type for float logits. Kernels for image positions (Team::kSize
/// of 1) and for QuickFloat exist only for the type of the logits; no caller needs another.
template <typename scalar_t, typename Team, typename Run>
void dispatch_gradient(c10::ScalarType dtype, const Run& run) {
  if constexpr (std::is_same_v<scalar_t, float> && Team::kSize > 1) {
    if (dtype == c10::ScalarType::Half) return run.template operator()<c10::Half>();
    if (dtype == c10::ScalarType::BFloat16) return run.template operator()<c10::BFloat16>();
  }
  if constexpr (std::is_same_v<scalar_t, QuickFloat>) {
    run.template operator()<float>();
  } else {
    run.template operator()<scalar_t>();
  }
}

/// Returns rows as their kernels see them.
template <typename scalar_t>
CrossEntropyTable<scalar_t> table_of(const LogitRows& rows) {
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;
  const math::LossTerms<double>& terms = rows.terms;
  return {.input = static_cast<const scalar_t*>(rows.logits),
          .input_at = rows.at,
          .rows = rows.rows,
          .classes = rows.classes,
          .target = rows.target,
          .index_type = rows.index_type,
          .ignore_index = rows.ignore_index,
          .weight = static_cast<const acc_t*>(rows.weight),
          .probabilities = static_cast<const acc_t*>(rows.probabilities),
          .probabilities_at = rows.probabilities_at,
          .terms = {static_cast<acc_t>(terms.of_target), static_cast<acc_t>(terms.uniform),
                    static_cast<Number>(terms.z_loss), static_cast<acc_t>(terms.softcap)},
          .is_shard = rows.is_shard};
}

/// True if the loss needs only the logits and the target of a row.
inline bool is_plain(const LogitRows& rows) {
  const math::LossTerms<double>& terms = rows.terms;
  return rows.target != nullptr && terms.of_target == 1 && terms.uniform == 0 && terms.softcap == 0;
}

inline DeviceRoom device_room(const LaunchStream& stream) {
  return {.multiprocessors = stream.multiprocessors(),
          .shared = stream.attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          .shared_per_block = stream.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .l2 = stream.attribute(cudaDevAttrL2CacheSize),
          .prefers_whole = has_variant("whole_rows"),
          .holds_twice = has_variant("held_twice")};
}

}  // namespace ampfuse
