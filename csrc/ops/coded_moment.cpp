#include "coded_moment.h"

#include <ATen/ATen.h>

#include <cmath>
#include <initializer_list>
#include <tuple>

#include "../math/coded_moment.h"
#include "../tensors/dtype_name.h"
#include "fused_step.h"
#include "registration.h"

namespace ampfuse {

namespace {

// Returns the elements in the order of memory, or of indices if they are not dense.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor.as_strided_symint({tensor.sym_numel()}, {1})
                                               : tensor.flatten();
}

// Returns a dense tensor with the shape of `like`, of which `elements` are flat().
at::Tensor shaped_like(const at::Tensor& elements, const at::Tensor& like) {
  const auto order = like.is_non_overlapping_and_dense() ? at::MemoryFormat::Preserve
                                                         : at::MemoryFormat::Contiguous;
  const at::Tensor shaped = at::empty_like(like, elements.options(), order);
  flat(shaped).copy_(elements);
  return shaped;
}

// Returns the least bfloat16 from 4 ulps below on, as math::code_unit() does.
at::Tensor rounded_up(const at::Tensor& x) {
  const at::Tensor up = at::bitwise_and(x.contiguous().view(at::kInt) + 0xfffb, -0x10000);
  return at::where(x.isfinite(), up.view(at::kFloat), std::nan(""));
}

// Returns the roots of groups in units, or 0 in groups of zeros and of NaNs.
at::Tensor in_units(const at::Tensor& roots, const at::Tensor& units) {
  return at::where(units > 0, roots / units, 0.0).nan_to_num(0);
}

// Returns the unit of each group. If all roots are whole multiples of a bfloat16, it was their unit
// before they were decoded. Random rounding may have given the largest root one of the three
// largest codes.
at::Tensor units_of(const at::Tensor& roots, int most) {
  const at::Tensor largest = roots.amax(1, /*keepdim=*/true);
  at::Tensor units = rounded_up(largest * (1 / static_cast<float>(most)));
  for (const int code : {most - 2, most - 1, most}) {  // the last one that fits counts
    const at::Tensor former = (largest / code).to(at::kBFloat16).to(at::kFloat);
    const at::Tensor codes = in_units(roots, former);
    const at::Tensor fits = codes.eq(codes.round()).all(1, /*keepdim=*/true) & units.isfinite();
    units = at::where(fits, former, units);
  }
  return units;
}

}  // namespace

CodedMoment encode_moment(const at::Tensor& moment, bool is_signed) {
  TORCH_CHECK_TYPE(moment.is_floating_point(),
                   "encode_moment: moment: expected floating-point numbers, got ",
                   dtype_name(moment.scalar_type()));
  const int most = is_signed ? 127 : 255;
  const at::Tensor elements = flat(moment).to(at::kFloat);
  const c10::SymInt count = elements.sym_numel();
  const c10::SymInt groups = number_of_units(count);
  const at::Tensor padded =
      at::constant_pad_nd_symint(elements, {0, groups * math::kCodeGroup - count})
          .view_symint({groups, math::kCodeGroup});
  const at::Tensor roots = padded.abs().sqrt();
  const at::Tensor units = units_of(roots, most);
  at::Tensor codes = in_units(roots, units).round().clamp_max(most);
  codes = is_signed ? at::where(padded < 0, -codes, codes)
                    : at::where(padded > 0, codes.clamp_min(1), codes);
  codes = codes.to(is_signed ? at::kChar : at::kByte).flatten().slice_symint(0, 0, count);
  return {shaped_like(codes, moment), units.squeeze(1).to(at::kBFloat16)};
}

at::Tensor decode_moment(const at::Tensor& codes, const at::Tensor& units) {
  TORCH_CHECK_TYPE(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte,
                   "decode_moment: codes: expected int8 or uint8, got ",
                   dtype_name(codes.scalar_type()));
  const auto expected = number_of_units(codes.sym_numel());
  TORCH_CHECK_VALUE(units.dim() == 1 && units.sym_size(0) == expected,
                    "decode_moment: units: expected shape [", expected, "], one number for each ",
                    math::kCodeGroup, " codes, got ", units.sym_sizes());
  const at::Tensor elements = flat(codes).to(at::kFloat);
  const at::Tensor of_each = units.to(at::kFloat)
                                 .repeat_interleave(math::kCodeGroup)
                                 .slice_symint(0, 0, codes.sym_numel());
  const at::Tensor roots = elements * of_each;
  return shaped_like(roots * roots.abs(), codes);
}

AMPFUSE_OPERATORS(m) {
  m.def("encode_moment(Tensor moment, *, bool is_signed) -> (Tensor codes, Tensor units)",
        [](const at::Tensor& moment, bool is_signed) {
          const CodedMoment coded = encode_moment(moment, is_signed);
          return std::tuple(coded.codes, coded.units);
        },
        {at::Tag::pt2_compliant_tag});
  m.def("decode_moment(Tensor codes, Tensor units) -> Tensor", &decode_moment,
        {at::Tag::pt2_compliant_tag});
}

}  // namespace ampfuse
