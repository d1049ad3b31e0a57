// A folder for checkpoints, and the message of an error: shared by the tests of checkpoints.
#pragma once

#include <ampfuse/checkpoint.h>
#include <stdlib.h>

#include <algorithm>

namespace ampfuse {

/// A new folder, which is removed at the end.
struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "ampfuse-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().filename() != ".lock") found.push_back(entry.path().filename().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  std::filesystem::path path;
};

inline bool same_tensors(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const at::Tensor& a, const at::Tensor& b) {
                      return a.scalar_type() == b.scalar_type() && at::equal(a, b);
                    });
}

/// Returns the message of the checkpoint::Error that a function throws.
template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const checkpoint::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace ampfuse
