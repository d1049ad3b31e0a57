// Reads a checkpoint.
#pragma once

#include "tensor_file.h"

namespace ampfuse::checkpoint::detail {

class Reader {
 public:
  /// Reads the index, and compares the sizes and headers of all files with it.
  explicit Reader(fs::path folder);

  const fs::path& folder() const { return folder_; }
  const Index& index() const { return index_; }

  /// Returns a tensor after it was compared with its hashes. One that was sharded is assembled from
  /// its pieces.
  at::Tensor tensor(const std::string& name) const;

 private:
  fs::path folder_;
  Index index_;
  std::map<std::string, TensorFile> files_;
};

}  // namespace ampfuse::checkpoint::detail
