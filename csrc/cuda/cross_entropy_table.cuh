// What the kernels of a cross-entropy are told of it.
#pragma once

#include <cstdint>

#include "../math/cross_entropy.h"
#include "cross_entropy_exponential.cuh"

namespace ampfuse {

enum class IndexType { kLong, kInt, kByte };

// Where a tensor's rows are: one after another, each in one piece; or, of a team of one thread,
// places of a batch's entries, beside each other.
struct RowsAt {
  int64_t stride;        // from a row, or an entry, to the next
  int64_t places;        // of an entry
  int64_t class_stride;  // of a row

  template <typename Team>
  __device__ int64_t offset(int64_t row) const {
    if constexpr (Team::kSize == 1) return row / places * stride + row % places;
    return row * stride;
  }
};

// A call's arguments. Rows are int64_t, classes of a row int: the launcher refuses more.
template <typename scalar_t>
struct CrossEntropyTable {
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;

  const scalar_t* input;
  RowsAt input_at;
  int64_t rows;
  int classes;
  const void* target;  // indices, or null where there are probabilities
  IndexType index_type;
  int64_t ignore_index;
  const acc_t* weight;         // or null
  const acc_t* probabilities;  // or null
  RowsAt probabilities_at;
  math::LossTerms<acc_t, Number> terms;
  bool is_shard = false;  // of the classes: targets may be elsewhere

  __device__ int64_t index(int64_t row) const {
    switch (index_type) {
      case IndexType::kLong:
        return static_cast<const int64_t*>(target)[row];
      case IndexType::kInt:
        return static_cast<const int32_t*>(target)[row];
      default:
        return static_cast<const uint8_t*>(target)[row];
    }
  }
  __device__ bool is_class(int64_t index) const { return index >= 0 && index < classes; }
  __device__ bool is_ignored(int64_t row) const {
    return target != nullptr && index(row) == ignore_index;
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

  __device__ bool has_shares() const { return probabilities != nullptr || terms.uniform != 0; }
  // B of a class that is not the target of the row whose probabilities these are.
  __device__ acc_t share(const acc_t* row_probabilities, int c) const {
    acc_t share = terms.uniform;
    if (row_probabilities != nullptr) {
      share += terms.of_target * row_probabilities[c * probabilities_at.class_stride];
    }
    return share * weight_of(c);
  }

  __device__ acc_t z(acc_t logit) const { return math::softcapped(logit, terms.softcap); }

  // A target that is no class makes its row no number. Where all classes are here, no registers are
  // spent on targets elsewhere.
  template <typename Team, bool kMayBeElsewhere = false>
  __device__ math::RowTarget<Number> row_target(int64_t row) const {
    if (target == nullptr || is_ignored(row)) return {};
    const int64_t at = index(row);
    if (kMayBeElsewhere && is_shard && at == math::kElsewhere) return {};
    if (!is_class(at)) return {true, NAN, NAN};
    const auto x =
        static_cast<Number>(static_cast<acc_t>(logits_of<Team>(row)[at * input_at.class_stride]));
    return {true, math::softcapped(x, static_cast<Number>(terms.softcap)),
            (static_cast<Number>(terms.of_target) + terms.uniform) * weight_of(at)};
  }
  // Or -1.
  __device__ int target_class(int64_t row) const {
    const int64_t at = target == nullptr || is_ignored(row) ? -1 : index(row);
    return is_class(at) ? static_cast<int>(at) : -1;
  }
};

// A target that is no class, in memory that the host reads whenever it likes.
struct BadTarget {
  int64_t row;
  int64_t target;
  int is_set;
};

// What a block of rows' targets weigh, and the first of these rows that has none, or a larger
// number than there are rows.
struct TargetWeight {
  double weight;
  int64_t bad_row;
};

// How losses are reduced and gradients multiplied, by numbers that are on the device.
struct CrossEntropyReduction {
  const float* grad_scale;      // or null: 1
  const double* denominator;    // or null: what the targets weigh
  const TargetWeight* weights;  // of blocks of targets; null where there are probabilities
  int weight_blocks;
  bool is_mean;
  float limit;  // of what gradients are multiplied by
  float* baked_scale;
  double* divisor;
  BadTarget* bad_target;
  bool trap;  // stop the device instead
};

// What a call leaves; null where it is not asked for. The gradient may be narrower than what it is
// computed in.
template <typename scalar_t, typename grad_t = scalar_t>
struct CrossEntropyResults {
  RowAcc<scalar_t>* each_loss;  // of rows: not reduced
  double* block_losses;         // sums of what each block of the kernel saw
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
