#include "index.h"

#include <ampfuse/checkpoint.h>
#include <ampfuse/version.h>
#include <torch/version.h>

#include <array>

#include "hash.h"

namespace ampfuse::checkpoint::detail {

namespace {

constexpr int64_t kFormat = 1;
// checkpoint.json begins with the hash of all that follows.
constexpr std::string_view kBegin = "{\"hash\": \"";
constexpr std::string_view kEnd = "\",\n";

std::vector<int64_t> numbers_of(const at::IValue& list) {
  std::vector<int64_t> numbers;
  for (const at::IValue& number : list.toListRef()) numbers.push_back(number.toInt());
  return numbers;
}

Piece piece_of(const Dict& stored, const std::vector<int64_t>& start) {
  return {start, numbers_of(stored.at("shape")), stored.at("file").toStringRef(),
          stored.at("hash").toStringRef()};
}

TensorEntry tensor_entry(const Dict& stored) {
  TensorEntry entry{stored.at("dtype").toStringRef(), numbers_of(stored.at("shape")), {}};
  if (!stored.contains("pieces")) {
    entry.pieces.push_back(piece_of(stored, std::vector<int64_t>(entry.shape.size())));
    return entry;
  }
  for (const at::IValue& item : stored.at("pieces").toListRef()) {
    const Dict piece = item.toGenericDict();
    entry.pieces.push_back(piece_of(piece, numbers_of(piece.at("start"))));
  }
  return entry;
}

}  // namespace

List list_of(const std::vector<int64_t>& numbers) {
  List list = new_list();
  for (const int64_t number : numbers) list.push_back(number);
  return list;
}

void write_index(const fs::path& folder, const Index& index) {
  Dict files = new_dict();
  for (const auto& [name, entry] : index.files) {
    Dict file = new_dict();
    file.insert("bytes", entry.bytes);
    file.insert("header", entry.header);
    files.insert(name, file);
  }
  Dict tensors = new_dict();
  for (const auto& [name, entry] : index.tensors) {
    Dict tensor = new_dict();
    tensor.insert("dtype", entry.dtype);
    tensor.insert("shape", list_of(entry.shape));
    tensor.insert("file", entry.pieces.at(0).file);
    tensor.insert("hash", entry.pieces.at(0).hash);
    tensors.insert(name, tensor);
  }
  Dict content = new_dict();
  content.insert("format", kFormat);
  content.insert("ampfuse", AMPFUSE_VERSION);
  content.insert("torch", TORCH_VERSION);
  content.insert("step", index.step);
  content.insert("parts", index.parts);
  content.insert("files", files);
  content.insert("tensors", tensors);
  const std::string rest = to_json(content).substr(1) + "\n";
  const std::string hash = hash_of(rest);
  write_file(folder / kIndex, std::array<std::string_view, 4>{kBegin, hash, kEnd, rest});
}

Index read_index(const fs::path& folder) {
  const fs::path path = folder / kIndex;
  const std::string text = read_file(path);
  const size_t start = std::min(kBegin.size() + kHashDigits + kEnd.size(), text.size());
  std::string expected(kBegin);
  expected.append(hash_of(std::string_view(text).substr(start))).append(kEnd);
  if (text.substr(0, start) != expected) {
    throw Error(path.string() + ": the file has changed since it was written");
  }
  const Dict content = from_json(text).toGenericDict();
  const int64_t format = content.at("format").toInt();
  if (format > kFormat) {
    throw Error(path.string() + ": written in format " + std::to_string(format) + " by ampfuse " +
                content.at("ampfuse").toStringRef() + "; this version reads formats up to " +
                std::to_string(kFormat));
  }
  Index index;
  index.step = content.at("step").toInt();
  index.parts = content.at("parts").toGenericDict();
  for (const auto& entry : content.at("files").toGenericDict()) {
    const Dict file = entry.value().toGenericDict();
    index.files[entry.key().toStringRef()] = {file.at("bytes").toInt(),
                                              file.at("header").toStringRef()};
  }
  for (const auto& entry : content.at("tensors").toGenericDict()) {
    index.tensors[entry.key().toStringRef()] = tensor_entry(entry.value().toGenericDict());
  }
  return index;
}

}  // namespace ampfuse::checkpoint::detail
