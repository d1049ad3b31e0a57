#include "logit_rows.h"

namespace ampfuse {

namespace {

IndexType index_type(const at::Tensor& target) {
  switch (target.scalar_type()) {
    case at::kInt:
      return IndexType::kInt;
    case at::kByte:
      return IndexType::kByte;
    default:
      return IndexType::kLong;
  }
}

}  // namespace

void check_classes(const char* op, const char* argument, int64_t classes) {
  TORCH_CHECK_VALUE(classes <= kMostClasses, op, ": ", argument, ": expected at most ",
                    kMostClasses, " classes, got ", classes);
}

RowsAt rows_at(const at::Tensor& rows) {
  if (rows.dim() == 3) return {rows.stride(0), rows.size(2), rows.stride(1)};
  return {rows.stride(0), 1, 1};
}

LogitRows logit_rows(const CrossEntropyArguments& arguments, at::Tensor& converted) {
  const at::Tensor& input = arguments.input;
  check_classes(kCrossEntropy, "input", input.size(1));
  LogitRows rows = {};
  rows.logits = input.const_data_ptr();
  rows.dtype = input.scalar_type();
  rows.at = rows_at(input);
  rows.are_positions = arguments.has_positions();
  rows.rows = arguments.rows().expect_int();
  rows.classes = static_cast<int>(input.size(1));
  if (arguments.has_probabilities()) {
    // Other formats keep strides: those of overlapping rows need not be those of a matrix.
    converted = arguments.target.to(loss_dtype(input), /*non_blocking=*/false, /*copy=*/false,
                                    at::MemoryFormat::Contiguous);
    rows.probabilities = converted.const_data_ptr();
    rows.probabilities_at = rows_at(converted);
  } else {
    rows.target = arguments.target.const_data_ptr();
    rows.index_type = index_type(arguments.target);
  }
  rows.ignore_index = arguments.options.ignore_index;
  if (arguments.weight) rows.weight = arguments.weight->const_data_ptr();
  rows.terms = arguments.terms<double>();
  rows.is_shard = arguments.all_classes.has_value();
  rows.are_targets_checked = arguments.are_targets_checked;
  return rows;
}

}  // namespace ampfuse
