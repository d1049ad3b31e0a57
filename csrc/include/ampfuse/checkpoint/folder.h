// The folder of a run, which holds its checkpoints. Include ampfuse/checkpoint.h, not this file.
//
// A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and
// renamed. So it is complete or not there, whenever the process or the machine stops.
#pragma once

#include <ampfuse/checkpoint/files.h>
#include <sys/file.h>

#include <charconv>
#include <optional>
#include <random>

namespace ampfuse::checkpoint::detail {

inline constexpr std::string_view kUnfinished = ".unfinished-";
inline constexpr std::string_view kRemoved = ".removed-";

/// The name of a checkpoint: "step-00000040", or "step-00000040.1" if the step was saved before.
struct Name {
  int64_t step;
  int64_t number;

  auto operator<=>(const Name&) const = default;

  std::string text() const {
    std::string digits = std::to_string(step);
    digits.insert(0, digits.size() < 8 ? 8 - digits.size() : 0, '0');
    return "step-" + digits + (number ? "." + std::to_string(number) : "");
  }
};

inline std::optional<Name> name_of(const fs::path& path) {
  const std::string text = path.filename().string();
  if (!text.starts_with("step-")) return std::nullopt;
  Name name{};
  const char* const end = text.data() + text.size();
  const char* at = std::from_chars(text.data() + 5, end, name.step).ptr;
  if (at != end && *at == '.') std::from_chars(at + 1, end, name.number);
  if (name.text() != text) return std::nullopt;
  return name;
}

/// Returns the folders of a run that have the name of a checkpoint, the oldest step first.
inline std::map<Name, fs::path> folders_of(const fs::path& run) {
  std::map<Name, fs::path> found;
  if (!fs::is_directory(run)) return found;
  for (const auto& entry : fs::directory_iterator(run)) {
    if (const auto name = name_of(entry.path())) found[*name] = entry.path();
  }
  return found;
}

/// Returns the newest complete checkpoint of a run.
inline std::optional<fs::path> latest_of(const fs::path& run) {
  std::optional<fs::path> newest;
  for (const auto& [name, folder] : folders_of(run)) {
    if (fs::is_regular_file(folder / kIndex)) newest = folder;
  }
  return newest;
}

/// Returns the result of a function that looks at a path. Throws Error if it cannot be read.
template <typename Look>
auto looked_at(const fs::path& path, const Look& look) {
  try {
    return look();
  } catch (const fs::filesystem_error& error) {
    throw Error(path.string() + ": cannot be read: " + error.what());
  }
}

/// Returns the checkpoint at a path: the path itself, or the newest one of a run.
inline fs::path found(const fs::path& path) {
  return looked_at(path, [&] {
    const fs::path folder = fs::absolute(path);
    if (fs::is_regular_file(folder / kIndex)) return folder;
    if (const auto newest = latest_of(folder)) return *newest;
    throw Error(folder.string() + ": there is no complete checkpoint here");
  });
}

/// Removes a file or a folder. fs::remove_all is not used: pip's libtorch.so exports a copy of it
/// that crashes in programs that link libtorch.so before libtorch_cpu.so, as ${TORCH_LIBRARIES}
/// does.
inline void remove_tree(const fs::path& path, std::error_code& error) {
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

/// Removes a folder, or warns. A checkpoint is renamed first, so that it is never half there.
inline void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::path doomed = folder;
  if (name_of(folder)) {
    doomed = folder.parent_path() / (std::string(kRemoved) + folder.filename().string());
    fs::rename(folder, doomed, error);
  }
  if (!error) remove_tree(doomed, error);
  if (error) {
    TORCH_WARN("save: ", folder.string(), " cannot be removed: ", error.message());
  }
}

/// Locks the folder of a run, so that nothing else writes to it.
class RunLock {
 public:
  explicit RunLock(const fs::path& run) {
    if (fs::exists(run / kIndex)) {
      throw Error(run.string() + ": this is a checkpoint; pass the folder of the run");
    }
    fs::create_directories(run);
    file_ = ::open((run / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) throw fs::filesystem_error("open", run, {errno, std::generic_category()});
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      ::close(file_);
      throw Error(run.string() + ": another process writes a checkpoint here now");
    }
  }

  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  ~RunLock() {
    ::flock(file_, LOCK_UN);  // forked processes have the file open, too
    ::close(file_);
  }

 private:
  int file_ = -1;
};

/// The folder into which a checkpoint is written. The destructor removes it unless finish() was
/// called.
class Writing {
 public:
  Writing(const fs::path& run, int64_t step) : lock_(run), run_(run) {
    name_ = {step, 0};
    for (const auto& [name, path] : folders_of(run)) {
      if (name.step == step) name_.number = name.number + 1;
    }
    for (const auto& entry : fs::directory_iterator(run)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(kUnfinished) || name.starts_with(kRemoved)) remove_folder(entry.path());
    }
    unfinished_ = run / (std::string(kUnfinished) + name_.text() + "-" +
                         std::to_string(std::random_device{}()));
    fs::create_directory(unfinished_);
  }

  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  ~Writing() {
    std::error_code ignored;
    remove_tree(unfinished_, ignored);
  }

  const fs::path& folder() const { return unfinished_; }

  /// Gives the folder its name, and removes other checkpoints of the step. If `keep` is set, only
  /// this checkpoint and the `keep` − 1 others with the highest steps are left.
  fs::path finish(std::optional<int64_t> keep) {
    const fs::path path = run_ / name_.text();
    flush(unfinished_);
    fs::rename(unfinished_, path);
    flush(run_);
    std::vector<fs::path> others;
    for (const auto& [name, other] : folders_of(run_)) {
      if (name == name_ || !fs::exists(other / kIndex)) continue;
      if (name.step == name_.step) {
        remove_folder(other);
      } else {
        others.push_back(other);
      }
    }
    const auto old = keep ? static_cast<int64_t>(others.size()) - (*keep - 1) : 0;
    for (int64_t i = 0; i < old; ++i) remove_folder(others[static_cast<size_t>(i)]);
    return path;
  }

 private:
  RunLock lock_;
  fs::path run_;
  fs::path unfinished_;
  Name name_{};
};

}  // namespace ampfuse::checkpoint::detail
