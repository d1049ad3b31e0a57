// Reads, writes and removes files.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace ampfuse::checkpoint::detail {

namespace fs = std::filesystem;

/// Waits until the disk has the content of a file, or the names in a folder.
void flush(const fs::path& path);

/// Writes a file that consists of these parts, and flushes it.
void write_file(const fs::path& path, std::span<const std::string_view> parts);

/// Returns the first bytes of a file, at most `most`.
std::string read_file(const fs::path& path, size_t most = std::string::npos);

/// Removes a file, or a folder and all that is in it.
void remove_tree(const fs::path& path, std::error_code& error);

}  // namespace ampfuse::checkpoint::detail
