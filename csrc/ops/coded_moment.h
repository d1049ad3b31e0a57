// Converts whole moments between numbers and 8 bits (math/coded_moment.h), for loading and saving.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// A moment in 8 bits: int8 codes of a first moment, which has signs, or uint8 codes of a second
/// one, and a bfloat16 unit for each 32 of them in the order of memory.
struct CodedMoment {
  at::Tensor codes;
  at::Tensor units;
};

/// Rounds a moment to 8 bits, to nearest. The codes have the moment's shape and order of memory. A
/// moment that was decoded gets its old codes and units.
CodedMoment encode_moment(const at::Tensor& moment, bool is_signed);

/// Returns the float moment for which the codes stand.
at::Tensor decode_moment(const at::Tensor& codes, const at::Tensor& units);

}  // namespace ampfuse
