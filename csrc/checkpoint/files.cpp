#include "files.h"

#include <ampfuse/checkpoint.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <vector>

namespace ampfuse::checkpoint::detail {

void flush(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_flushed = file >= 0 && ::fsync(file) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (!is_flushed) throw fs::filesystem_error("flush", path, {error, std::generic_category()});
}

void write_file(const fs::path& path, std::span<const std::string_view> parts) {
  std::ofstream file(path, std::ios::binary);
  for (const std::string_view part : parts) {
    file.write(part.data(), static_cast<std::streamsize>(part.size()));
  }
  file.close();
  if (!file) throw fs::filesystem_error("write", path, {errno, std::generic_category()});
  flush(path);
}

std::string read_file(const fs::path& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::min<size_t>(most, file ? fs::file_size(path) : 0), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file) throw Error(path.string() + ": this file cannot be read");
  return text;
}

// fs::remove_all is not used: pip's libtorch.so exports a copy of it that crashes in programs that
// link libtorch.so before libtorch_cpu.so, as ${TORCH_LIBRARIES} does.
void remove_tree(const fs::path& path, std::error_code& error) {
  if (fs::is_directory(fs::symlink_status(path, error))) {
    std::vector<fs::path> inside;
    for (fs::directory_iterator entry(path, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
      inside.push_back(entry->path());
    }
    for (const fs::path& one : inside) {
      if (!error) remove_tree(one, error);
    }
  }
  if (!error) fs::remove(path, error);
  if (error == std::errc::no_such_file_or_directory) error.clear();  // another process was faster
}

}  // namespace ampfuse::checkpoint::detail
