// What a call's kernels ask about its rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "../ops/cross_entropy.h"
#include "vec/cross_entropy.h"

namespace ampfuse {

/// The rows of a call, as memory. Rows may be short and many, so that tensors are asked once.
class CpuRows {
 public:
  explicit CpuRows(const CrossEntropyArguments& arguments)
      : input_(static_cast<const char*>(arguments.input.const_data_ptr())),
        input_dtype_(arguments.input.scalar_type()),
        row_bytes_(arguments.input.stride(0) * arguments.input.itemsize()),
        item_bytes_(arguments.input.itemsize()),
        number_bytes_(static_cast<int64_t>(c10::elementSize(loss_dtype(arguments.input)))),
        count_(arguments.input.size(0)),
        classes_(arguments.input.size(1)),
        target_(static_cast<const char*>(arguments.target.const_data_ptr())),
        target_dtype_(arguments.target.scalar_type()),
        has_probabilities_(arguments.has_probabilities()),
        ignore_index_(arguments.ignore_index),
        z_loss_(arguments.z_loss),
        softcap_(arguments.softcap.value_or(0)),
        of_target_(1 - arguments.label_smoothing) {
    shares_.weight = arguments.weight ? arguments.weight->const_data_ptr() : nullptr;
    shares_.uniform = classes_ == 0 ? 0 : arguments.label_smoothing / static_cast<double>(classes_);
    if (!has_probabilities_) return;
    shares_.dtype = target_dtype_;
    shares_.of_probability = of_target_;
    probability_bytes_ = arguments.target.itemsize();
    probability_row_bytes_ = arguments.target.stride(0) * probability_bytes_;
  }

  int64_t count() const { return count_; }
  int64_t classes() const { return classes_; }
  int64_t blocks() const { return (classes_ + kClassBlock - 1) / kClassBlock; }
  bool has_probabilities() const { return has_probabilities_; }
  double z_loss() const { return z_loss_; }

  // An index, or -1 where there are probabilities.
  int64_t target(int64_t row) const {
    switch (target_dtype_) {
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

  bool is_ignored(int64_t row) const { return !has_probabilities_ && target(row) == ignore_index_; }

  double weight(int64_t index) const {
    if (shares_.weight == nullptr) return 1;
    return input_dtype_ == at::kDouble ? static_cast<const double*>(shares_.weight)[index]
                                       : static_cast<const float*>(shares_.weight)[index];
  }

  double logit(int64_t row, int64_t index) const {
    const void* const logit = input_ + row * row_bytes_ + index * item_bytes_;
    switch (input_dtype_) {
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

  math::RowTarget<double> row_target(int64_t row) const {
    if (has_probabilities_ || is_ignored(row)) return {};
    return {true, math::softcapped(logit(row, target(row)), softcap_), target_share(row)};
  }

  // Its B.
  double target_share(int64_t row) const {
    return has_probabilities_ ? 0 : weight(target(row)) * (of_target_ + shares_.uniform);
  }

  // Of an ignored row no class is its target, though `ignore_index` may be one.
  Logits logits(int64_t row, int64_t block) const {
    const int64_t first = block * kClassBlock;
    const int64_t count = std::min(kClassBlock, classes_ - first);
    const int64_t target = is_ignored(row) ? -1 : this->target(row) - first;
    return {input_ + row * row_bytes_ + first * item_bytes_, input_dtype_, count,
            target >= 0 && target < count ? target : -1, softcap_};
  }

  ClassShares shares(int64_t row, int64_t block) const {
    ClassShares shares = shares_;
    const int64_t first = block * kClassBlock;
    if (shares.weight != nullptr) {
      shares.weight = static_cast<const char*>(shares.weight) + first * number_bytes_;
    }
    if (has_probabilities_) {
      shares.probabilities = target_ + row * probability_row_bytes_ + first * probability_bytes_;
    }
    return shares;
  }

  // Of the exponentials of so many blocks.
  int64_t exponentials_bytes(int64_t blocks) const {
    return blocks * kExponentials * number_bytes_;
  }

  double reference(double largest) const {
    if (!math::is_finite(largest)) return largest;
    return AMPFUSE_CHOOSE(row_reference)(input_dtype_, largest);
  }

  // Of what the blocks of a row tell, kept apart from what follows.
  int64_t parts_bytes() const {
    return (blocks() * static_cast<int64_t>(sizeof(math::RowPart<double>)) + 63) / 64 * 64;
  }

 private:
  const char* input_;
  c10::ScalarType input_dtype_;
  int64_t row_bytes_;
  int64_t item_bytes_;
  int64_t number_bytes_;  // of what is computed with
  int64_t count_;
  int64_t classes_;
  const char* target_;
  c10::ScalarType target_dtype_;
  bool has_probabilities_;
  int64_t probability_bytes_ = 0;
  int64_t probability_row_bytes_ = 0;
  int64_t ignore_index_;
  double z_loss_;
  double softcap_;
  double of_target_;
  ClassShares shares_;
};

/// A matrix to write to. The pointer is asked for once, on one thread: memory that is shared until
/// it is written is made its own by that.
class RowWriter {
 public:
  RowWriter() = default;
  explicit RowWriter(const at::Tensor& matrix)
      : data_(static_cast<char*>(matrix.mutable_data_ptr())),
        row_bytes_(matrix.stride(0) * matrix.itemsize()),
        item_bytes_(matrix.itemsize()),
        classes_(matrix.size(1)) {}

  bool is_wanted() const { return data_ != nullptr; }
  void* at(int64_t row, int64_t first) const {
    return data_ + row * row_bytes_ + first * item_bytes_;
  }
  void zero(int64_t row) const { std::memset(at(row, 0), 0, classes_ * item_bytes_); }

 private:
  char* data_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t item_bytes_ = 0;
  int64_t classes_ = 0;
};

/// Numbers to write to that are float or double.
class NumberWriter {
 public:
  NumberWriter() = default;
  explicit NumberWriter(const at::Tensor& numbers)
      : data_(numbers.mutable_data_ptr()), is_double_(numbers.scalar_type() == at::kDouble) {}

  void put(int64_t index, double value) const {
    if (is_double_) {
      static_cast<double*>(data_)[index] = value;
    } else {
      static_cast<float*>(data_)[index] = static_cast<float>(value);
    }
  }

 private:
  void* data_ = nullptr;
  bool is_double_ = false;
};

}  // namespace ampfuse
