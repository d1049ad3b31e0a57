// Turns state into JSON and named tensors, and back. Include ampfuse/checkpoint.h, not this file.
//
// Numbers, texts, lists and dicts with texts as keys stay as they are. JSON has no tensors, tuples,
// other keys, NaN or infinity. Each of these is a dict with one key, for example {"$tensor": name}.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ampfuse::checkpoint {

/// Thrown for a checkpoint that is damaged, incomplete or of other objects, and for one that cannot
/// be written.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

using Json = nlohmann::ordered_json;
using Dict = c10::impl::GenericDict;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using TensorOf = std::function<at::Tensor(const std::string& name)>;

struct DtypeName {
  at::ScalarType dtype;
  const char* torch;
  const char* safetensors;
};

inline constexpr DtypeName kDtypes[] = {
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

inline const DtypeName& names_of(at::ScalarType dtype) {
  for (const DtypeName& names : kDtypes) {
    if (names.dtype == dtype) return names;
  }
  throw Error(std::string("tensors of ") + c10::toString(dtype) + " cannot be stored");
}

inline const DtypeName& names_of(const std::string& torch_name) {
  for (const DtypeName& names : kDtypes) {
    if (names.torch == torch_name) return names;
  }
  throw Error("this version of ampfuse cannot load tensors of " + torch_name);
}

inline Dict new_dict() {
  return Dict(c10::AnyType::get(), c10::AnyType::get());
}

inline Json tagged(const char* kind, Json value) {
  Json object = Json::object();
  object[kind] = std::move(value);
  return object;
}

/// Encodes states as JSON, and collects their tensors, each once.
class Encoder {
 public:
  /// Returns a value as JSON. `place`: where it is, for example "optimizer/state/0".
  Json operator()(const at::IValue& value, const std::string& place) {
    if (value.isNone()) return nullptr;
    if (value.isBool()) return value.toBool();
    if (value.isInt()) return value.toInt();
    if (value.isDouble()) return number(value.toDouble());
    if (value.isString()) return value.toStringRef();
    if (value.isTensor()) return tagged("$tensor", name_of(value.toTensor(), place));
    if (value.isTuple()) return tagged("$tuple", list(value.toTupleRef().elements(), place));
    if (value.isList()) return list(value.toListRef(), place);
    if (value.isGenericDict()) return dict(value.toGenericDict(), place);
    throw Error("save: " + place + " is of type " + value.tagKind() +
                "; a checkpoint holds tensors, numbers, texts, lists, tuples and dicts of them");
  }

  const NamedTensors& tensors() const { return tensors_; }

 private:
  static Json number(double value) {
    if (std::isfinite(value)) return value;
    return tagged("$float", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
  }

  template <typename Values>
  Json list(const Values& values, const std::string& place) {
    Json items = Json::array();
    for (const at::IValue& value : values) {
      items.push_back((*this)(value, place + "/" + std::to_string(items.size())));
    }
    return items;
  }

  Json dict(const Dict& values, const std::string& place) {
    Json plain = Json::object();
    Json pairs = Json::array();
    bool is_plain = true;
    for (const auto& entry : values) {
      Json key = (*this)(entry.key(), place);
      const std::string text = key.is_string() ? key.get<std::string>() : key.dump();
      is_plain &= key.is_string() && !text.starts_with("$");
      plain[text] = (*this)(entry.value(), place + "/" + text);
      pairs.push_back(Json::array({std::move(key), plain[text]}));
    }
    return is_plain ? plain : tagged("$dict", std::move(pairs));
  }

  std::string name_of(const at::Tensor& tensor, std::string place) {
    const auto known = names_.find(tensor.unsafeGetTensorImpl());
    if (known != names_.end()) return known->second;
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() ||
        tensor.is_quantized() || (tensor.numel() > 0 && !tensor.storage().data())) {
      throw Error("save: " + place +
                  ": expected a dense tensor with memory that is not quantized, got " +
                  tensor.toString());
    }
    names_of(tensor.scalar_type());  // throws for a dtype that cannot be stored
    while (!used_.insert(place).second) place += "~";
    names_[tensor.unsafeGetTensorImpl()] = place;
    tensors_.emplace_back(place, tensor);  // not detached, so that its address stays in use
    return place;
  }

  NamedTensors tensors_;
  std::map<const void*, std::string> names_;
  std::set<std::string> used_;
};

/// Returns a tensor with the dimensions that it had before it was permuted to this order.
inline at::Tensor in_order(const std::vector<int64_t>& order, const at::Tensor& tensor) {
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  }
  return tensor.permute(inverse);
}

inline at::IValue decoded(const Json& value, const TensorOf& tensor_of);

inline std::vector<at::IValue> decoded_items(const Json& items, const TensorOf& tensor_of) {
  std::vector<at::IValue> values;
  for (const Json& item : items) values.push_back(decoded(item, tensor_of));
  return values;
}

inline at::IValue decoded_object(const std::string& kind, const Json& item,
                                 const TensorOf& tensor_of) {
  if (kind == "$tensor" || kind == "$array") return tensor_of(item.get<std::string>());
  if (kind == "$order") {
    return in_order(item[0].get<std::vector<int64_t>>(), tensor_of(item[1].get<std::string>()));
  }
  if (kind == "$tuple") return c10::ivalue::Tuple::create(decoded_items(item, tensor_of));
  if (kind == "$float") return std::stod(item.get<std::string>());
  if (kind == "$counter") return decoded(item, tensor_of);
  if (kind == "$dict") {
    Dict result = new_dict();
    for (const Json& pair : item) {
      result.insert(decoded(pair[0], tensor_of), decoded(pair[1], tensor_of));
    }
    return result;
  }
  return item.get<std::string>();  // of $bytes, $dtype and $device, the text
}

/// Returns the value that was encoded.
inline at::IValue decoded(const Json& value, const TensorOf& tensor_of) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) {
    throw Error("a number of the checkpoint does not fit into int64: " + value.dump());
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    c10::impl::GenericList result(c10::AnyType::get());
    for (at::IValue& item : decoded_items(value, tensor_of)) result.push_back(std::move(item));
    return result;
  }
  if (value.size() == 1 && value.begin().key().starts_with("$")) {
    return decoded_object(value.begin().key(), value.begin().value(), tensor_of);
  }
  Dict result = new_dict();
  for (const auto& [key, item] : value.items()) result.insert(key, decoded(item, tensor_of));
  return result;
}

/// Adds the names of all tensors in an encoded value.
inline void add_tensors_of(const Json& value, std::set<std::string>& names) {
  if (!value.is_structured()) return;
  for (const auto& [key, item] : value.items()) {
    if (value.is_object() && (key == "$tensor" || key == "$array")) {
      names.insert(item.get<std::string>());
    } else if (value.is_object() && key == "$order") {
      names.insert(item[1].get<std::string>());
    } else {
      add_tensors_of(item, names);
    }
  }
}

}  // namespace detail
}  // namespace ampfuse::checkpoint
