#include "encoding.h"

#include <ATen/ops/empty.h>
#include <ampfuse/checkpoint.h>

#include <cmath>

#include "dtypes.h"

namespace ampfuse::checkpoint::detail {

namespace {

Dict tagged(const char* kind, at::IValue value) {
  Dict dict = new_dict();
  dict.insert(kind, std::move(value));
  return dict;
}

std::vector<at::IValue> decoded_items(const at::IValue& items, const TensorOf& tensor_of) {
  std::vector<at::IValue> values;
  for (const at::IValue& item : items.toListRef()) values.push_back(decoded(item, tensor_of));
  return values;
}

at::IValue decoded_tag(const std::string& kind, const at::IValue& item, const TensorOf& tensor_of) {
  if (kind == "$array") return tensor_of(item.toStringRef());
  if (kind == "$tuple") return c10::ivalue::Tuple::create(decoded_items(item, tensor_of));
  if (kind == "$float") return std::stod(item.toStringRef());
  if (kind == "$counter") return decoded(item, tensor_of);
  if (kind == "$int") {
    throw Error("a number of the checkpoint does not fit into int64: " + item.toStringRef());
  }
  if (kind == "$dict") {
    Dict result = new_dict();
    for (const at::IValue& pair : item.toListRef()) {
      const auto key_and_value = decoded_items(pair, tensor_of);
      result.insert_or_assign(key_and_value.at(0), key_and_value.at(1));
    }
    return result;
  }
  return item;  // of $bytes, $dtype and $device, the text
}

}  // namespace

at::IValue Encoder::operator()(const at::IValue& value, const std::string& place) {
  if (value.isNone() || value.isBool() || value.isInt() || value.isString()) return value;
  if (value.isDouble()) {
    const double number = value.toDouble();
    if (std::isfinite(number)) return value;
    return tagged("$float", std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf");
  }
  if (value.isTensor()) return tagged("$tensor", name_of(value.toTensor(), place));
  if (value.isTuple()) return tagged("$tuple", list(value.toTupleRef().elements(), place));
  if (value.isList()) return list(value.toListRef(), place);
  if (value.isGenericDict()) return dict(value.toGenericDict(), place);
  throw Error("save: " + place + " is of type " + value.tagKind() +
              "; a checkpoint holds tensors, numbers, texts, lists, tuples and dicts of them");
}

List Encoder::list(c10::ArrayRef<at::IValue> values, const std::string& place) {
  List items = new_list();
  for (const at::IValue& value : values) {
    items.push_back((*this)(value, place + "/" + std::to_string(items.size())));
  }
  return items;
}

Dict Encoder::dict(const Dict& values, const std::string& place) {
  Dict plain = new_dict();
  List pairs = new_list();
  bool is_plain = true;
  for (const auto& entry : values) {
    const at::IValue key = (*this)(entry.key(), place);
    const std::string text = key.isString() ? key.toStringRef() : to_json(key);
    is_plain &= key.isString() && !text.starts_with("$");
    const at::IValue value = (*this)(entry.value(), place + "/" + text);
    plain.insert_or_assign(text, value);
    List pair = new_list();
    pair.push_back(key);
    pair.push_back(value);
    pairs.push_back(pair);
  }
  return is_plain ? plain : tagged("$dict", pairs);
}

std::string Encoder::name_of(const at::Tensor& tensor, std::string place) {
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

at::IValue decoded(const at::IValue& encoded, const TensorOf& tensor_of) {
  if (const auto stored = stored_tensor(encoded)) {
    return stored->unpermuted(tensor_of(stored->name));
  }
  if (encoded.isList()) {
    List result = new_list();
    for (at::IValue& item : decoded_items(encoded, tensor_of)) result.push_back(std::move(item));
    return result;
  }
  if (!encoded.isGenericDict()) return encoded;
  const Dict dict = encoded.toGenericDict();
  if (dict.size() == 1 && dict.begin()->key().toStringRef().starts_with("$")) {
    return decoded_tag(dict.begin()->key().toStringRef(), dict.begin()->value(), tensor_of);
  }
  Dict result = new_dict();
  for (const auto& entry : dict) result.insert(entry.key(), decoded(entry.value(), tensor_of));
  return result;
}

void add_tensors_of(const at::IValue& encoded, std::set<std::string>& names) {
  if (const auto stored = stored_tensor(encoded)) {
    names.insert(stored->name);
  } else if (encoded.isList()) {
    for (const at::IValue& item : encoded.toListRef()) add_tensors_of(item, names);
  } else if (encoded.isGenericDict()) {
    for (const auto& entry : encoded.toGenericDict()) {
      if (entry.key().toStringRef() == "$array") {
        names.insert(entry.value().toStringRef());
      } else {
        add_tensors_of(entry.value(), names);
      }
    }
  }
}

at::Tensor StoredTensor::unpermuted(const at::Tensor& stored) const {
  if (order.empty()) return stored;
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    inverse.at(static_cast<size_t>(order[i])) = static_cast<int64_t>(i);
  }
  return stored.permute(inverse);
}

std::vector<int64_t> StoredTensor::unpermuted(const std::vector<int64_t>& stored_shape) const {
  return unpermuted(at::empty(stored_shape, at::kMeta)).sizes().vec();
}

std::optional<StoredTensor> stored_tensor(const at::IValue& encoded) {
  if (!encoded.isGenericDict()) return std::nullopt;
  const Dict dict = encoded.toGenericDict();
  if (dict.contains("$tensor")) return StoredTensor{dict.at("$tensor").toStringRef(), {}};
  if (!dict.contains("$order")) return std::nullopt;
  const auto order_and_name = dict.at("$order").toListRef();
  StoredTensor stored{order_and_name.at(1).toStringRef(), {}};
  for (const at::IValue& dim : order_and_name.at(0).toListRef()) {
    stored.order.push_back(dim.toInt());
  }
  return stored;
}

double to_double(const at::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

bool has(const Dict& dict, const char* key) {
  return dict.contains(key) && !dict.at(key).isNone();
}

}  // namespace ampfuse::checkpoint::detail
