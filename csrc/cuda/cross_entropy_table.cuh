// The arguments and results of the kernels of a cross-entropy.
#pragma once

#include <cstdint>

#include "../math/cross_entropy.h"
#include "cross_entropy_exponential.cuh"
#include "cross_entropy_interface.h"

namespace ampfuse {

// A target index as it was loaded. It is converted when it is used, so that a thread does not wait
// for the load earlier.
struct RawIndex {
  uint64_t bits;
};

// The arguments of a call. Indices of rows are int64_t, indices of classes int; the launcher
// rejects more classes than an int can index.
template <typename scalar_t>
struct CrossEntropyTable {
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;

  const scalar_t* input;
  RowsAt input_at;
  int64_t rows;
  int classes;
  const void* target;  // indices, or null if targets are probabilities
  IndexType index_type;
  int64_t ignore_index;
  const acc_t* weight;         // or null
  const acc_t* probabilities;  // or null
  RowsAt probabilities_at;
  math::LossTerms<acc_t, Number> terms;
  bool is_shard = false;  // true: targets may be math::kElsewhere

  // Requests the target index of a row. Returns 0 after the last row, or if targets are
  // probabilities.
  __device__ RawIndex raw_index(int64_t row) const {
    if (target == nullptr || row >= rows) return {0};
    switch (index_type) {
      case IndexType::kLong:
        return {static_cast<const uint64_t*>(target)[row]};
      case IndexType::kInt:
        return {static_cast<const uint32_t*>(target)[row]};
      default:
        return {static_cast<const uint8_t*>(target)[row]};
    }
  }
  __device__ int64_t index(RawIndex raw) const {
    if (index_type == IndexType::kInt) return static_cast<int32_t>(raw.bits);
    return static_cast<int64_t>(raw.bits);
  }
  __device__ int64_t index(int64_t row) const { return index(raw_index(row)); }
  __device__ bool is_class(int64_t index) const { return index >= 0 && index < classes; }
  __device__ bool is_ignored(int64_t index) const {
    return target != nullptr && index == ignore_index;
  }
  // Returns the target class, or −1 if the row is ignored, its target is out of range or on another
  // shard, or targets are probabilities.
  __device__ int class_of(int64_t index) const {
    const bool has_class = target != nullptr && index != ignore_index && is_class(index);
    return has_class ? static_cast<int>(index) : -1;
  }
  __device__ acc_t weight_of(int64_t index) const { return weight == nullptr ? 1 : weight[index]; }

  template <typename Team>
  __device__ const scalar_t* logits_of(int64_t row) const {
    return input + input_at.template offset<Team>(row);
  }
  template <typename Team>
  __device__ const acc_t* probabilities_of(int64_t row) const {
    if (probabilities == nullptr) return nullptr;
    return probabilities + probabilities_at.template offset<Team>(row);
  }

  __device__ bool has_masses() const { return probabilities != nullptr || terms.uniform != 0; }
  // Returns B of class c for a row with these probabilities. c must not be the row's target class.
  __device__ acc_t mass(const acc_t* row_probabilities, int c) const {
    acc_t mass = terms.uniform;
    if (row_probabilities != nullptr) {
      mass += terms.of_target * row_probabilities[c * probabilities_at.class_stride];
    }
    return mass * weight_of(c);
  }

  __device__ acc_t z(acc_t logit) const { return math::softcapped(logit, terms.softcap); }

  __device__ bool is_elsewhere(int64_t index) const {
    return is_shard && index == math::kElsewhere;
  }
  // Requests the logit of a class of a row; 0 for class −1.
  template <typename Team>
  __device__ scalar_t logit(int64_t row, int c) const {
    if (c < 0) return static_cast<scalar_t>(0.0f);
    return logits_of<Team>(row)[c * input_at.class_stride];
  }
  // Returns the target of a row with this target class. `is_absent`: the row is ignored, or its
  // target is on another shard. Otherwise, class −1 is a target out of range, which makes the row
  // NaN.
  __device__ math::RowTarget<Number> row_target(bool is_absent, int c, scalar_t logit) const {
    if (target == nullptr || is_absent) return {};
    if (c < 0) return {true, NAN, NAN};
    const auto x = static_cast<Number>(static_cast<acc_t>(logit));
    // If the code added of_target and uniform first, each thread would keep the sum in a register.
    const auto w = static_cast<Number>(weight_of(c));
    const Number mass = w * terms.of_target;
    return {true, math::softcapped(x, static_cast<Number>(terms.softcap)),
            terms.uniform == 0 ? mass : mass + w * terms.uniform};
  }
};

// The total weight of the targets that a block has read, and the first of these rows whose target
// is out of range, or the number of all rows if every target is valid.
struct TargetWeight {
  double weight;
  int64_t bad_row;
};

// How losses are reduced and gradients scaled. All pointers but bad_target are to device memory.
struct CrossEntropyReduction {
  const float* grad_scale;      // null: 1
  const double* denominator;    // null: the total weight of the targets
  const TargetWeight* weights;  // one per block; null: probabilities, or targets validated before
  int weight_blocks;
  bool is_mean;
  float limit;         // upper bound on |baked_scale / divisor|
  float* baked_scale;  // null if not asked for
  double* divisor;
  BadTarget* bad_target;
  bool trap;  // stop the device instead of reporting a bad target
};

// The sum or mean of all losses, and the memory through which the last block gets those of others.
template <typename acc_t>
struct ReducedLoss {
  acc_t* loss;        // null if not asked for
  double* of_blocks;  // sum of the losses of each block's rows
  unsigned* finished;
};

// The results of a call; null if not asked for. The gradient may be narrower than the type in which
// it is computed.
template <typename scalar_t, typename grad_t>
struct CrossEntropyResults {
  RowAcc<scalar_t>* row_losses;  // one per row, with reduction none
  ReducedLoss<RowAcc<scalar_t>> reduced;
  math::RowStatistics* statistics;
  grad_t* grad;
  RowsAt grad_at;
  RowAcc<scalar_t>* lse;
  RowAcc<scalar_t>* entropy;
  int64_t* argmax;

  template <typename Team>
  __device__ grad_t* grad_of(int64_t row) const {
    return grad + grad_at.template offset<Team>(row);
  }
};

}  // namespace ampfuse
