// Turns state into JSON's values and named tensors, and back.
//
// Numbers, texts, lists and dicts with texts as keys stay as they are. JSON has no tensors, tuples,
// other keys, NaN or infinity. Each of these is a dict with one key, for example {"$tensor": name}.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "json.h"

namespace ampfuse::checkpoint::detail {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using TensorOf = std::function<at::Tensor(const std::string& name)>;

/// Encodes states, and collects their tensors, each once.
class Encoder {
 public:
  /// `place`: where the value is, for example "optimizer/state/0".
  at::IValue operator()(const at::IValue& value, const std::string& place);

  const NamedTensors& tensors() const { return tensors_; }

 private:
  List list(c10::ArrayRef<at::IValue> values, const std::string& place);
  Dict dict(const Dict& values, const std::string& place);
  std::string name_of(const at::Tensor& tensor, std::string place);

  NamedTensors tensors_;
  std::map<const void*, std::string> names_;
  std::set<std::string> used_;
};

/// Returns the value that was encoded.
at::IValue decoded(const at::IValue& encoded, const TensorOf& tensor_of);

/// Adds the names of all tensors in an encoded value.
void add_tensors_of(const at::IValue& encoded, std::set<std::string>& names);

/// A tensor that was encoded. If it was permuted when it was stored, `order` are its dimensions in
/// the order of the stored ones.
struct StoredTensor {
  std::string name;
  std::vector<int64_t> order;

  /// Returns the stored tensor with the dimensions that it had before it was permuted.
  at::Tensor unpermuted(const at::Tensor& stored) const;
  /// Returns the shape of that tensor.
  std::vector<int64_t> unpermuted(const std::vector<int64_t>& stored_shape) const;
};

/// Returns nothing for a value that is no encoded tensor.
std::optional<StoredTensor> stored_tensor(const at::IValue& encoded);

/// Returns a real number that is stored as a number or as a tensor.
double to_double(const at::IValue& value);

/// Returns true if a dict has the entry, and it is not None.
bool has(const Dict& dict, const char* key);

}  // namespace ampfuse::checkpoint::detail
