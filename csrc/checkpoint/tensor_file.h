// The files of tensors in a checkpoint, in the format of safetensors.
#pragma once

#include <map>

#include "encoding.h"
#include "index.h"

namespace ampfuse::checkpoint::detail {

/// Writes tensors of any device into files of at most 4 GiB, or of one larger tensor, and adds the
/// files and the tensors with their hashes to the index.
void write_tensors(const fs::path& folder, const NamedTensors& tensors, Index& index);

/// Returns a tensor on the CPU as it is stored: contiguous, with conjugation and negation done.
at::Tensor stored_form(const at::Tensor& tensor);

/// A file of tensors that is read. Each tensor is compared with its hash.
class TensorFile {
 public:
  /// Compares the file's size and header with the index.
  TensorFile(fs::path path, const FileEntry& expected);

  at::Tensor read(const std::string& name, const Piece& piece, at::ScalarType dtype) const;

 private:
  fs::path path_;
  std::map<std::string, int64_t> offsets_;  // of tensors, from the start of the file
};

}  // namespace ampfuse::checkpoint::detail
