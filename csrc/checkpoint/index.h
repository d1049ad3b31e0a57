// checkpoint.json: what a checkpoint holds, and the hashes of its files. It is written last.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"

namespace ampfuse::checkpoint::detail {

inline constexpr const char* kIndex = "checkpoint.json";

/// A file of tensors.
struct FileEntry {
  int64_t bytes;
  std::string header;  // the hash of the file's header
};

/// A part of a tensor, or the whole tensor, in a file.
struct Piece {
  std::vector<int64_t> start;
  std::vector<int64_t> shape;
  std::string file;
  std::string hash;
};

/// A tensor, which several ranks may have written in pieces.
struct TensorEntry {
  std::string dtype;  // torch's name
  std::vector<int64_t> shape;
  std::vector<Piece> pieces;
};

struct Index {
  int64_t step = 0;
  Dict parts = new_dict();  // the encoded states of the objects
  std::map<std::string, FileEntry> files;
  std::map<std::string, TensorEntry> tensors;
};

/// Writes checkpoint.json, whose hash covers the whole checkpoint. All pieces are whole tensors.
void write_index(const fs::path& folder, const Index& index);

Index read_index(const fs::path& folder);

/// Returns a list of integers as JSON's value.
List list_of(const std::vector<int64_t>& numbers);

}  // namespace ampfuse::checkpoint::detail
