// What a call's kernels ask about its rows.
#pragma once

#include <algorithm>

#include "../ops/cross_entropy.h"
#include "vec/cross_entropy.h"

namespace ampfuse {

/// The rows of a call, as memory.
class CpuRows {
 public:
  explicit CpuRows(const CrossEntropyArguments& arguments)
      : arguments_(arguments),
        input_(static_cast<const char*>(arguments.input.const_data_ptr())),
        target_(static_cast<const char*>(arguments.target.const_data_ptr())) {
    const double spread = arguments.label_smoothing;
    shares_.weight = arguments.weight ? arguments.weight->const_data_ptr() : nullptr;
    shares_.uniform = classes() == 0 ? 0 : spread / static_cast<double>(classes());
    if (arguments.has_probabilities()) {
      shares_.dtype = arguments.target.scalar_type();
      shares_.of_probability = 1 - spread;
    }
  }

  int64_t count() const { return arguments_.input.size(0); }
  int64_t classes() const { return arguments_.input.size(1); }
  int64_t blocks() const { return (classes() + kClassBlock - 1) / kClassBlock; }
  bool has_probabilities() const { return arguments_.has_probabilities(); }
  double z_loss() const { return arguments_.z_loss; }

  // An index, or -1 where there are probabilities.
  int64_t target(int64_t row) const {
    switch (arguments_.target.scalar_type()) {
      case at::kLong:
        return reinterpret_cast<const int64_t*>(target_)[row];
      case at::kInt:
        return reinterpret_cast<const int32_t*>(target_)[row];
      case at::kByte:
        return reinterpret_cast<const uint8_t*>(target_)[row];
      default:
        return -1;
    }
  }

  bool is_ignored(int64_t row) const {
    return !has_probabilities() && target(row) == arguments_.ignore_index;
  }

  double weight(int64_t index) const {
    if (!arguments_.weight) return 1;
    return arguments_.input.scalar_type() == at::kDouble
               ? static_cast<const double*>(shares_.weight)[index]
               : static_cast<const float*>(shares_.weight)[index];
  }

  double logit(int64_t row, int64_t index) const {
    const void* const logit =
        input_ + (row * arguments_.input.stride(0) + index) * arguments_.input.itemsize();
    return logit_at(logit);
  }

  math::RowTarget<double> row_target(int64_t row) const {
    if (has_probabilities() || is_ignored(row)) return {};
    const double z = math::softcapped(logit(row, target(row)), arguments_.softcap.value_or(0));
    return {true, z, target_share(row)};
  }

  // Its B.
  double target_share(int64_t row) const {
    if (arguments_.has_probabilities()) return 0;
    return weight(target(row)) * (1 - arguments_.label_smoothing + shares_.uniform);
  }

  Logits logits(int64_t row, int64_t block) const {
    const int64_t first = block * kClassBlock;
    const int64_t count = std::min(kClassBlock, classes() - first);
    const int64_t target = this->target(row) - first;
    return {input_ + (row * arguments_.input.stride(0) + first) * arguments_.input.itemsize(),
            arguments_.input.scalar_type(), count, target >= 0 && target < count ? target : -1,
            arguments_.softcap.value_or(0)};
  }

  ClassShares shares(int64_t row, int64_t block) const {
    ClassShares shares = shares_;
    const int64_t first = block * kClassBlock;
    if (shares.weight != nullptr) {
      const auto size = static_cast<int64_t>(c10::elementSize(loss_dtype(arguments_.input)));
      shares.weight = static_cast<const char*>(shares.weight) + first * size;
    }
    if (arguments_.has_probabilities()) {
      shares.probabilities =
          target_ + (row * arguments_.target.stride(0) + first) * arguments_.target.itemsize();
    }
    return shares;
  }

  // Of the exponentials of so many blocks.
  int64_t exponentials_bytes(int64_t blocks) const {
    return blocks * kExponentials *
           static_cast<int64_t>(c10::elementSize(loss_dtype(arguments_.input)));
  }

  double reference(double largest) const {
    if (!math::is_finite(largest)) return largest;
    return AMPFUSE_CHOOSE(row_reference)(arguments_.input.scalar_type(), largest);
  }

  // Of what the blocks of a row tell, kept apart from what follows.
  int64_t parts_bytes() const {
    return (blocks() * static_cast<int64_t>(sizeof(math::RowPart<double>)) + 63) / 64 * 64;
  }

 private:
  double logit_at(const void* logit) const {
    switch (arguments_.input.scalar_type()) {
      case at::kHalf:
        return *static_cast<const c10::Half*>(logit);
      case at::kBFloat16:
        return *static_cast<const c10::BFloat16*>(logit);
      case at::kFloat:
        return *static_cast<const float*>(logit);
      default:
        return *static_cast<const double*>(logit);
    }
  }

  const CrossEntropyArguments& arguments_;
  const char* input_;
  const char* target_;
  ClassShares shares_;
};

}  // namespace ampfuse
