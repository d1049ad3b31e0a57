// Memory layout of rows of logits, of their gradient and of the results per row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

#include "vec/cross_entropy_tile.h"

namespace ampfuse {

/// A row and its location. In [batch, classes, positions], `entry` is the index in the batch and
/// `position` the position. In [rows, classes], `entry` is the row and `position` is 0.
struct RowLocation {
  int64_t row;
  int64_t entry;
  int64_t position;
};

/// Addresses of the rows of [rows, classes] or [batch, classes, positions]. Sizes and strides are
/// read from the tensor only once, because there may be many short rows.
class RowLayout {
 public:
  RowLayout() = default;
  explicit RowLayout(const at::Tensor& rows)
      : by_row_(rows.dim() == 2),
        positions_(by_row_ ? 1 : rows.size(2)),
        stride_(rows.stride(0)),
        class_stride_(by_row_ ? 1 : rows.stride(1)),
        item_bytes_(rows.itemsize()) {}

  int64_t offset(const RowLocation& at) const {
    return (at.entry * stride_ + at.position) * item_bytes_;
  }
  int64_t offset(int64_t row, int64_t index) const {
    const int64_t first = by_row_ ? row * stride_ : row / positions_ * stride_ + row % positions_;
    return (first + index * class_stride_) * item_bytes_;
  }
  TileLayout tile_layout() const { return {by_row_, by_row_ ? stride_ : class_stride_}; }

 private:
  bool by_row_ = true;
  int64_t positions_ = 1;
  int64_t stride_ = 0;  // from one row, or entry of the batch, to the next
  int64_t class_stride_ = 1;
  int64_t item_bytes_ = 0;
};

/// Rows to write to. The constructor requests the pointer once, on one thread, because this makes a
/// lazy clone allocate its own memory.
class RowWriter {
 public:
  RowWriter() = default;
  explicit RowWriter(const at::Tensor& rows)
      : data_(static_cast<char*>(rows.mutable_data_ptr())),
        dtype_(rows.scalar_type()),
        layout_(rows),
        bytes_(rows.size(1) * rows.itemsize()) {}

  bool is_wanted() const { return data_ != nullptr; }
  c10::ScalarType dtype() const { return dtype_; }
  void* at(int64_t row, int64_t first) const { return data_ + layout_.offset(row, first); }
  void* at(const RowLocation& row) const { return data_ + layout_.offset(row); }
  TileLayout tile_layout() const { return layout_.tile_layout(); }
  // Requires rows with contiguous classes.
  void zero(int64_t row) const { std::memset(at(row, 0), 0, bytes_); }

 private:
  char* data_ = nullptr;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  RowLayout layout_;
  int64_t bytes_ = 0;
};

/// A float or double tensor to write numbers to.
class NumberWriter {
 public:
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
  void* data_;
  bool is_double_;
};

}  // namespace ampfuse
