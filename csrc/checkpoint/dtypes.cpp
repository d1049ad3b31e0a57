#include "dtypes.h"

#include <ampfuse/checkpoint.h>

namespace ampfuse::checkpoint::detail {

namespace {

constexpr DtypeName kDtypes[] = {
    {at::kDouble, "torch.float64", "F64"},
    {at::kFloat, "torch.float32", "F32"},
    {at::kHalf, "torch.float16", "F16"},
    {at::kBFloat16, "torch.bfloat16", "BF16"},
    {at::kComplexFloat, "torch.complex64", "C64"},
    {at::kBool, "torch.bool", "BOOL"},
    {at::kLong, "torch.int64", "I64"},
    {at::kInt, "torch.int32", "I32"},
    {at::kShort, "torch.int16", "I16"},
    {at::kChar, "torch.int8", "I8"},
    {at::kUInt64, "torch.uint64", "U64"},
    {at::kUInt32, "torch.uint32", "U32"},
    {at::kUInt16, "torch.uint16", "U16"},
    {at::kByte, "torch.uint8", "U8"},
    {at::kFloat8_e4m3fn, "torch.float8_e4m3fn", "F8_E4M3"},
    {at::kFloat8_e5m2, "torch.float8_e5m2", "F8_E5M2"},
};

}  // namespace

const DtypeName& names_of(at::ScalarType dtype) {
  for (const DtypeName& names : kDtypes) {
    if (names.dtype == dtype) return names;
  }
  throw Error(std::string("tensors of ") + c10::toString(dtype) + " cannot be stored");
}

at::ScalarType dtype_of(const std::string& torch_name) {
  for (const DtypeName& names : kDtypes) {
    if (names.torch == torch_name) return names.dtype;
  }
  throw Error("this version of ampfuse cannot load tensors of " + torch_name);
}

}  // namespace ampfuse::checkpoint::detail
