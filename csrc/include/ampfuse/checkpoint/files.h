// The files of a checkpoint: tensors in the format of safetensors, with a hash for each, and
// checkpoint.json. Include ampfuse/checkpoint.h, not this file.
#pragma once

#if !__has_include(<xxhash.h>) || !__has_include(<nlohmann/json.hpp>)
#error "ampfuse/checkpoint.h needs xxhash and nlohmann-json (apt: libxxhash-dev nlohmann-json3-dev)"
#endif
#define XXH_INLINE_ALL  // so that programs need not link xxhash

#include <ATen/ops/empty.h>
#include <ampfuse/checkpoint/values.h>
#include <ampfuse/version.h>
#include <fcntl.h>
#include <torch/version.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

namespace ampfuse::checkpoint::detail {

namespace fs = std::filesystem;

inline constexpr const char* kIndex = "checkpoint.json";
inline constexpr int64_t kFormat = 1;
// checkpoint.json begins with the hash of all that follows.
inline constexpr std::string_view kBegin = "{\"hash\": \"";
inline constexpr std::string_view kEnd = "\",\n";
inline constexpr size_t kHashDigits = 32;
inline constexpr int64_t kMostBytes = int64_t{1} << 32;  // of a file, unless one tensor is larger

inline std::string hash_of(const void* data, size_t size) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
  std::string digits;
  for (const unsigned char byte : canonical.digest) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

inline std::string hash_of(const std::string& text) {
  return hash_of(text.data(), text.size());
}

inline std::string hash_of(const at::Tensor& tensor) {
  return hash_of(tensor.const_data_ptr(), tensor.nbytes());
}

/// Waits until the disk has the content of a file, or the names in a folder.
inline void flush(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY);
  const bool is_flushed = file >= 0 && ::fsync(file) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (!is_flushed) throw fs::filesystem_error("flush", path, {error, std::generic_category()});
}

inline void write_file(const fs::path& path, std::span<const std::string_view> parts) {
  std::ofstream file(path, std::ios::binary);
  for (const std::string_view part : parts) {
    file.write(part.data(), static_cast<std::streamsize>(part.size()));
  }
  file.close();
  if (!file) throw fs::filesystem_error("write", path, {errno, std::generic_category()});
  flush(path);
}

inline std::string read_file(const fs::path& path, size_t most = std::string::npos) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::min<size_t>(most, file ? fs::file_size(path) : 0), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file) throw Error(path.string() + ": this file cannot be read");
  return text;
}

/// Returns the length of a safetensors file's header, from the first 8 bytes of the file.
inline uint64_t header_length(const std::string& bytes) {
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), std::min(bytes.size(), sizeof length));
  return length;
}

/// Writes tensors of the CPU to a file, and adds the file and the tensors to the index.
inline void write_tensors(const fs::path& path, NamedTensors tensors, Json& index) {
  // Readers map tensors from the file, so each begins at a multiple of its elements' size.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
    return one.second.element_size() > other.second.element_size();
  });
  Json header = Json::object();
  int64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t begin = end;
    end += static_cast<int64_t>(tensor.nbytes());
    header[name] = {{"dtype", names_of(tensor.scalar_type()).safetensors},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {begin, end}}};
    index["tensors"][name] = {{"dtype", names_of(tensor.scalar_type()).torch},
                              {"shape", tensor.sizes().vec()},
                              {"file", path.filename().string()},
                              {"hash", hash_of(tensor)}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string begin(sizeof(uint64_t), '\0');
  const uint64_t length = text.size();
  std::memcpy(begin.data(), &length, sizeof length);
  begin += text;
  std::vector<std::string_view> parts = {begin};
  for (const auto& [name, tensor] : tensors) {
    parts.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  write_file(path, parts);
  index["files"][path.filename().string()] = {{"bytes", fs::file_size(path)},
                                              {"header", hash_of(begin)}};
}

/// Writes all tensors, on any device, into files of at most 4 GiB, or of one larger tensor.
inline void write_all_tensors(const fs::path& folder, const NamedTensors& tensors, Json& index) {
  index["files"] = index["tensors"] = Json::object();
  NamedTensors batch;
  int64_t size = 0;
  const auto write = [&] {
    if (batch.empty()) return;
    std::string number = std::to_string(index["files"].size());
    number.insert(0, number.size() < 5 ? 5 - number.size() : 0, '0');
    write_tensors(folder / ("tensors-" + number + ".safetensors"), std::move(batch), index);
    batch.clear();
    size = 0;
  };
  for (const auto& [name, tensor] : tensors) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (size + bytes > kMostBytes) write();
    size += bytes;
    batch.emplace_back(name, tensor.detach().resolve_conj().resolve_neg().cpu().contiguous());
  }
  write();
}

/// Writes checkpoint.json, whose hash covers the whole checkpoint.
inline void write_index(const fs::path& folder, const Json& content) {
  Json index = {{"format", kFormat}, {"ampfuse", AMPFUSE_VERSION}, {"torch", TORCH_VERSION}};
  index.update(content);
  const std::string rest = index.dump().substr(1) + "\n";
  const std::string hash = hash_of(rest);
  write_file(folder / kIndex, std::array<std::string_view, 4>{kBegin, hash, kEnd, rest});
}

inline Json read_index(const fs::path& folder) {
  const fs::path path = folder / kIndex;
  const std::string text = read_file(path);
  const size_t start = std::min(kBegin.size() + kHashDigits + kEnd.size(), text.size());
  const std::string expected =
      std::string(kBegin) + hash_of(text.substr(start)) + std::string(kEnd);
  if (text.substr(0, start) != expected) {
    throw Error(path.string() + ": the file has changed since it was written");
  }
  Json content = Json::parse(text);
  if (content["format"].get<int64_t>() > kFormat) {
    throw Error(path.string() + ": written in format " + content["format"].dump() + " by ampfuse " +
                content["ampfuse"].get<std::string>() + "; this version reads formats up to " +
                std::to_string(kFormat));
  }
  return content;
}

/// A file of tensors that is read. Each tensor is compared with its hash.
class TensorFile {
 public:
  TensorFile(fs::path path, const Json& expected) : path_(std::move(path)) {
    if (!fs::is_regular_file(path_)) throw Error(path_.string() + ": this file is missing");
    const uint64_t size = fs::file_size(path_);
    const auto bytes = expected["bytes"].get<uint64_t>();
    if (size != bytes) {
      throw Error(path_.string() + ": expected " + std::to_string(bytes) + " bytes, got " +
                  std::to_string(size));
    }
    const uint64_t length = header_length(read_file(path_, sizeof(uint64_t)));
    const std::string text = read_file(path_, sizeof length + std::min(length, size));
    if (hash_of(text) != expected["header"]) {
      throw Error(path_.string() + ": its header has changed since it was written");
    }
    header_ = Json::parse(text.substr(sizeof length));
    start_ = text.size();
  }

  at::Tensor read(const std::string& name, const Json& piece, at::ScalarType dtype) const {
    at::Tensor tensor = at::empty(piece["shape"].get<std::vector<int64_t>>(), dtype);
    std::ifstream file(path_, std::ios::binary);
    file.seekg(
        static_cast<std::streamoff>(start_ + header_.at(name)["data_offsets"][0].get<uint64_t>()));
    file.read(static_cast<char*>(tensor.mutable_data_ptr()),
              static_cast<std::streamsize>(tensor.nbytes()));
    if (!file || hash_of(tensor) != piece["hash"]) {
      throw Error(path_.string() + ": " + name + ": the tensor has changed since it was written");
    }
    return tensor;
  }

 private:
  fs::path path_;
  Json header_;
  uint64_t start_ = 0;
};

/// Reads a checkpoint.
class Reader {
 public:
  explicit Reader(fs::path folder) : folder_(std::move(folder)), content_(read_index(folder_)) {
    for (const auto& [name, expected] : content_["files"].items()) {
      files_.emplace(name, TensorFile(folder_ / name, expected));
    }
  }

  const fs::path& folder() const { return folder_; }
  const Json& content() const { return content_; }

  /// Returns a tensor. One that was sharded is assembled from its pieces.
  at::Tensor tensor(const std::string& name) const {
    const Json& entry = content_["tensors"][name];
    const at::ScalarType dtype = names_of(entry["dtype"].get<std::string>()).dtype;
    if (!entry.contains("pieces")) return piece(name, entry, dtype);
    at::Tensor whole = at::empty(entry["shape"].get<std::vector<int64_t>>(), dtype);
    for (const Json& part : entry["pieces"]) {
      const at::Tensor source = piece(name, part, dtype);
      at::Tensor target = whole;
      for (int64_t dim = 0; dim < source.dim(); ++dim) {
        const auto start = part["start"][static_cast<size_t>(dim)].get<int64_t>();
        target = target.narrow(dim, start, source.size(dim));
      }
      target.copy_(source);
    }
    return whole;
  }

 private:
  at::Tensor piece(const std::string& name, const Json& entry, at::ScalarType dtype) const {
    return files_.at(entry["file"].get<std::string>()).read(name, entry, dtype);
  }

  fs::path folder_;
  Json content_;
  std::map<std::string, TensorFile> files_;
};

}  // namespace ampfuse::checkpoint::detail
