// The rows of a call as CPU kernels read them.
#pragma once

#include <algorithm>

#include "../math/cross_entropy_shards.h"
#include "../ops/cross_entropy.h"
#include "cross_entropy_row_layout.h"
#include "vec/cross_entropy_targets.h"

namespace ampfuse {

class CpuRows {
 public:
  explicit CpuRows(const CrossEntropyArguments& arguments)
      : input_(static_cast<const char*>(arguments.input.const_data_ptr())),
        input_dtype_(arguments.input.scalar_type()),
        input_layout_(arguments.input),
        number_bytes_(static_cast<int64_t>(c10::elementSize(loss_dtype(arguments.input)))),
        count_(arguments.rows().expect_int()),
        classes_(arguments.input.size(1)),
        positions_(arguments.has_positions() ? arguments.input.size(2) : 0),
        target_(static_cast<const char*>(arguments.target.const_data_ptr())),
        target_dtype_(arguments.target.scalar_type()),
        has_probabilities_(arguments.has_probabilities()),
        ignore_index_(arguments.options.ignore_index),
        is_shard_(arguments.all_classes.has_value()),
        terms_(arguments.terms<double>()) {
    masses_.weight = arguments.weight ? arguments.weight->const_data_ptr() : nullptr;
    masses_.uniform = terms_.uniform;
    if (!has_probabilities_) return;
    masses_.dtype = target_dtype_;
    masses_.of_probability = terms_.of_target;
    probability_layout_ = RowLayout(arguments.target);
  }

  // True if the gradient has a narrower dtype and overwrites the logits, each row from its start.
  // If the classes of a row are processed in order, each logit is read before it is overwritten.
  bool are_narrowed_by(const RowWriter& grad) const {
    return grad.is_wanted() && grad.dtype() != input_dtype_ && grad.at(0, 0) == input_;
  }

  int64_t count() const { return count_; }
  int64_t classes() const { return classes_; }
  int64_t blocks() const { return (classes_ + kClassBlock - 1) / kClassBlock; }
  bool has_probabilities() const { return has_probabilities_; }
  const math::LossTerms<double>& terms() const { return terms_; }

  // True if the rows are processed tile by tile.
  bool are_tiled() const { return positions_ > 0 || classes_ <= kFewClasses; }
  // All rows of a tile belong to the same entry of the batch.
  int64_t tiles() const {
    return positions_ == 0 ? tiles_of(count_) : tiles_of(positions_) * (count_ / positions_);
  }
  RowLocation first_row_of(int64_t tile) const {
    if (positions_ == 0) return {tile * kTileRows, tile * kTileRows, 0};
    const int64_t each = tiles_of(positions_);
    const int64_t entry = tile / each;
    const int64_t position = (tile - entry * each) * kTileRows;
    return {entry * positions_ + position, entry, position};
  }
  // Returns the tile whose first row is `first`.
  Tile tile(const RowLocation& first) const {
    const int64_t rest = positions_ == 0 ? count_ - first.row : positions_ - first.position;
    Tile tile = {input_ + input_layout_.offset(first),
                 input_dtype_,
                 input_layout_.tile_layout(),
                 std::min(kTileRows, rest),
                 classes_,
                 terms_,
                 masses_,
                 probability_layout_.tile_layout(),
                 nullptr,
                 target_dtype_,
                 ignore_index_};
    if (has_probabilities_) {
      tile.masses.probabilities = target_ + probability_layout_.offset(first);
    } else {
      with_targets(first.row, [&](const auto* targets) { tile.targets = targets; });
    }
    return tile;
  }

  // Total weight of the targets of some rows, and the first row with a target out of range (or -1).
  struct TargetWeight {
    double weight = 0;
    int64_t bad_row = -1;
  };
  TargetWeight weigh_targets(int64_t begin, int64_t end) const {
    TargetWeight all;
    with_targets(begin, [&](const auto* targets) {
      const TargetCount indices = AMPFUSE_CHOOSE(count_targets)(targets, target_dtype_, end - begin,
                                                                ignore_index_, classes_);
      all.weight = static_cast<double>(indices.counted);
      if (indices.are_in_range && masses_.weight == nullptr) return;
      all.weight = 0;
      for (int64_t i = 0; i < end - begin; ++i) {
        const int64_t target = targets[i];
        if (target == ignore_index_) continue;
        if (target < 0 || target >= classes_) {
          all.bad_row = begin + i;
          return;
        }
        all.weight += weight(target);
      }
    });
    return all;
  }

  // Returns the target as passed: a class, ignore_index or math::kElsewhere; -1 for probabilities.
  int64_t target(int64_t row) const {
    int64_t target = -1;
    with_targets(row, [&](const auto* targets) { target = *targets; });
    return target;
  }

  bool is_ignored(int64_t row) const { return !has_probabilities_ && target(row) == ignore_index_; }

  double weight(int64_t index) const {
    if (masses_.weight == nullptr) return 1;
    return input_dtype_ == at::kDouble ? static_cast<const double*>(masses_.weight)[index]
                                       : static_cast<const float*>(masses_.weight)[index];
  }

  double logit(int64_t row, int64_t index) const {
    const void* const logit = input_ + input_layout_.offset(row, index);
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

  // Returns no target if the row is ignored, if its target is on another shard, or if targets are
  // probabilities.
  math::RowTarget<double> row_target(int64_t row) const {
    if (has_probabilities_ || is_ignored(row) || target(row) == math::kElsewhere) return {};
    return {true, math::softcapped(logit(row, target(row)), terms_.softcap),
            target_mass(target(row))};
  }

  // B of the target class (math/cross_entropy.h).
  double target_mass(int64_t target) const {
    return target < 0 ? 0 : weight(target) * (terms_.of_target + terms_.uniform);
  }

  // Returns the statistics of a row for the gradient of its classes.
  math::RowStatistics statistics(const math::RowStatistics* of_rows, int64_t row) const {
    return is_shard_ ? math::of_shard(of_rows[row], target_mass(target(row))) : of_rows[row];
  }

  // An ignored row has no target, even if `ignore_index` is a class.
  Logits logits(int64_t row, int64_t block) const {
    const int64_t first = block * kClassBlock;
    const int64_t count = std::min(kClassBlock, classes_ - first);
    const int64_t target = is_ignored(row) ? -1 : this->target(row) - first;
    return {input_ + input_layout_.offset(row, first), input_dtype_, count,
            target >= 0 && target < count ? target : -1, terms_.softcap};
  }

  ClassMasses masses(int64_t row, int64_t block) const {
    ClassMasses masses = masses_;
    const int64_t first = block * kClassBlock;
    if (masses.weight != nullptr) {
      masses.weight = static_cast<const char*>(masses.weight) + first * number_bytes_;
    }
    if (has_probabilities_) {
      masses.probabilities = target_ + probability_layout_.offset(row, first);
    }
    return masses;
  }

  // Size of the exponentials of this many blocks.
  int64_t exponentials_bytes(int64_t blocks) const {
    return blocks * kExponentials * number_bytes_;
  }

  double reference(double largest) const {
    if (!math::is_finite(largest)) return largest;
    return AMPFUSE_CHOOSE(row_reference)(input_dtype_, largest);
  }

  // Size of the RowPartials of a row's blocks, in whole cache lines of 64 bytes.
  int64_t partials_bytes() const {
    return (blocks() * static_cast<int64_t>(sizeof(math::RowPartial<double>)) + 63) / 64 * 64;
  }

 private:
  // Rows with at most this many classes are processed in tiles. For far more classes, moving a tile
  // into lanes and back takes longer than processing it row by row.
  static constexpr int64_t kFewClasses = 128;

  // Calls visit(pointer to the targets from `row` on) if targets are indices.
  template <typename Visit>
  void with_targets(int64_t row, const Visit& visit) const {
    switch (target_dtype_) {
      case at::kLong:
        return visit(reinterpret_cast<const int64_t*>(target_) + row);
      case at::kInt:
        return visit(reinterpret_cast<const int32_t*>(target_) + row);
      case at::kByte:
        return visit(reinterpret_cast<const uint8_t*>(target_) + row);
      default:
        return;
    }
  }

  static int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

  const char* input_;
  c10::ScalarType input_dtype_;
  RowLayout input_layout_;
  int64_t number_bytes_;  // size of a number of the arithmetic's type
  int64_t count_;
  int64_t classes_;
  int64_t positions_;  // 0 if the classes of a row are contiguous
  const char* target_;
  c10::ScalarType target_dtype_;
  bool has_probabilities_;
  RowLayout probability_layout_;
  int64_t ignore_index_;
  bool is_shard_;
  math::LossTerms<double> terms_;
  ClassMasses masses_;
};

}  // namespace ampfuse
