// The folder of a run, which holds its checkpoints.
//
// A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and
// renamed. So it is complete or not there, whenever the process or the machine stops.
#pragma once

#include <ampfuse/checkpoint.h>

#include "files.h"

namespace ampfuse::checkpoint::detail {

/// The name of a checkpoint: "step-00000040", or "step-00000040.1" if the step was saved before.
struct Name {
  int64_t step;
  int64_t number;

  auto operator<=>(const Name&) const = default;

  std::string text() const;
};

/// Returns the newest complete checkpoint of a run.
std::optional<fs::path> latest_of(const fs::path& run);

/// Returns the checkpoint at a path: the path itself, or the newest one of a run.
fs::path found(const fs::path& path);

/// Returns the result of a function that looks at a path. Throws Error if it cannot be read.
template <typename Look>
auto looked_at(const fs::path& path, const Look& look) {
  try {
    return look();
  } catch (const fs::filesystem_error& error) {
    throw Error(path.string() + ": cannot be read: " + error.what());
  }
}

/// Locks the folder of a run, so that nothing else writes to it. One save of this process waits for
/// another one. Saves of other processes are refused. Any thread may destroy the lock.
class RunLock {
 public:
  explicit RunLock(const fs::path& run);
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

 private:
  int file_ = -1;
};

/// The folder into which a checkpoint is written. The destructor removes it unless finish() was
/// called.
class Writing {
 public:
  Writing(const fs::path& run, int64_t step);
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing();

  /// The folder in which the files are written.
  const fs::path& folder() const { return unfinished_; }

  /// The path that the checkpoint has when it is complete.
  fs::path path() const { return run_ / name_.text(); }

  /// Gives the folder its name, and removes other checkpoints of the step. If `keep` is set, only
  /// this checkpoint and the `keep` − 1 others with the highest steps are left.
  void finish(std::optional<int64_t> keep);

 private:
  RunLock lock_;
  fs::path run_;
  fs::path unfinished_;
  Name name_{};
};

}  // namespace ampfuse::checkpoint::detail
