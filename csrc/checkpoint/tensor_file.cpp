#include "tensor_file.h"

#include <ATen/ops/empty.h>
#include <ampfuse/checkpoint.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "dtypes.h"
#include "hash.h"

namespace ampfuse::checkpoint::detail {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 32;  // of a file, unless one tensor is larger

// Returns the length of a file's header, from the first 8 bytes of the file.
uint64_t header_length(const std::string& bytes) {
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), std::min(bytes.size(), sizeof length));
  return length;
}

// Writes tensors of the CPU to one file.
void write_one_file(const fs::path& path, NamedTensors tensors, Index& index) {
  // Readers map tensors from the file, so each begins at a multiple of its elements' size.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
    return one.second.element_size() > other.second.element_size();
  });
  const std::string file = path.filename().string();
  Dict header = new_dict();
  int64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t begin = end;
    end += static_cast<int64_t>(tensor.nbytes());
    const DtypeName& dtype = names_of(tensor.scalar_type());
    const std::vector<int64_t> shape = tensor.sizes().vec();
    Dict entry = new_dict();
    entry.insert("dtype", dtype.safetensors);
    entry.insert("shape", list_of(shape));
    entry.insert("data_offsets", list_of({begin, end}));
    header.insert(name, entry);
    index.tensors[name] = {dtype.torch, shape, {{{}, shape, file, hash_of(tensor)}}};
  }
  std::string text = to_json(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string begin(sizeof(uint64_t), '\0');
  const uint64_t length = text.size();
  std::memcpy(begin.data(), &length, sizeof length);
  begin += text;
  std::vector<std::string_view> parts = {begin};
  for (const auto& [name, tensor] : tensors) parts.push_back(bytes_of(tensor));
  write_file(path, parts);
  index.files[file] = {static_cast<int64_t>(fs::file_size(path)), hash_of(begin)};
}

}  // namespace

at::Tensor stored_form(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

void write_tensors(const fs::path& folder, const NamedTensors& tensors, Index& index) {
  NamedTensors batch;
  int64_t size = 0;
  const auto write = [&] {
    if (batch.empty()) return;
    std::string number = std::to_string(index.files.size());
    number.insert(0, number.size() < 5 ? 5 - number.size() : 0, '0');
    write_one_file(folder / ("tensors-" + number + ".safetensors"), std::move(batch), index);
    batch.clear();
    size = 0;
  };
  for (const auto& [name, tensor] : tensors) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (size + bytes > kMostBytes) write();
    size += bytes;
    batch.emplace_back(name, stored_form(tensor));
  }
  write();
}

TensorFile::TensorFile(fs::path path, const FileEntry& expected) : path_(std::move(path)) {
  if (!fs::is_regular_file(path_)) throw Error(path_.string() + ": this file is missing");
  const uint64_t size = fs::file_size(path_);
  if (size != static_cast<uint64_t>(expected.bytes)) {
    throw Error(path_.string() + ": expected " + std::to_string(expected.bytes) + " bytes, got " +
                std::to_string(size));
  }
  const uint64_t length = header_length(read_file(path_, sizeof(uint64_t)));
  const std::string header = read_file(path_, sizeof length + std::min(length, size));
  if (hash_of(header) != expected.header) {
    throw Error(path_.string() + ": its header has changed since it was written");
  }
  const Dict entries = from_json(header.substr(sizeof length)).toGenericDict();
  for (const auto& entry : entries) {
    const Dict tensor = entry.value().toGenericDict();
    if (!tensor.contains("data_offsets")) continue;  // metadata
    const int64_t begin = tensor.at("data_offsets").toListRef().at(0).toInt();
    offsets_[entry.key().toStringRef()] = static_cast<int64_t>(header.size()) + begin;
  }
}

at::Tensor TensorFile::read(const std::string& name, const Piece& piece,
                            at::ScalarType dtype) const {
  at::Tensor tensor = at::empty(piece.shape, dtype);
  std::ifstream file(path_, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offsets_.at(name)));
  file.read(static_cast<char*>(tensor.mutable_data_ptr()),
            static_cast<std::streamsize>(tensor.nbytes()));
  if (!file || hash_of(tensor) != piece.hash) {
    throw Error(path_.string() + ": " + name + ": the tensor has changed since it was written");
  }
  return tensor;
}

}  // namespace ampfuse::checkpoint::detail
