#include "run_folder.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <random>
#include <semaphore>

#include "index.h"

namespace ampfuse::checkpoint::detail {

namespace {

constexpr std::string_view kUnfinished = ".unfinished-";
constexpr std::string_view kRemoved = ".removed-";

std::binary_semaphore no_save_under_way(1);  // of this process

std::optional<Name> name_of(const fs::path& path) {
  const std::string text = path.filename().string();
  if (!text.starts_with("step-")) return std::nullopt;
  Name name{};
  const char* const end = text.data() + text.size();
  const char* at = std::from_chars(text.data() + 5, end, name.step).ptr;
  if (at != end && *at == '.') std::from_chars(at + 1, end, name.number);
  if (name.text() != text) return std::nullopt;
  return name;
}

// Returns the folders of a run that have the name of a checkpoint, the oldest step first.
std::map<Name, fs::path> folders_of(const fs::path& run) {
  std::map<Name, fs::path> found;
  if (!fs::is_directory(run)) return found;
  for (const auto& entry : fs::directory_iterator(run)) {
    if (const auto name = name_of(entry.path())) found[*name] = entry.path();
  }
  return found;
}

// Removes a folder, or warns. A checkpoint is renamed first, so that it is never half there.
void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::path doomed = folder;
  if (name_of(folder)) {
    doomed = folder.parent_path() / std::string(kRemoved).append(folder.filename().string());
    fs::rename(folder, doomed, error);
  }
  if (!error) remove_tree(doomed, error);
  if (error) {
    TORCH_WARN("save: ", folder.string(), " cannot be removed: ", error.message());
  }
}

// Returns the locked file, or throws.
int locked_file(const fs::path& run) {
  if (fs::exists(run / kIndex)) {
    throw Error(run.string() + ": this is a checkpoint; pass the folder of the run");
  }
  fs::create_directories(run);
  const int file = ::open((run / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) throw fs::filesystem_error("open", run, {errno, std::generic_category()});
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) return file;
  if (errno == EWOULDBLOCK) {
    ::close(file);
    throw Error(run.string() + ": another process writes a checkpoint here now");
  }
  TORCH_WARN("save: ", run.string(), " cannot be locked (", std::strerror(errno),
             "): make sure that no other process saves there");  // a network file system, perhaps
  return file;
}

}  // namespace

std::string Name::text() const {
  std::string digits = std::to_string(step);
  digits.insert(0, digits.size() < 8 ? 8 - digits.size() : 0, '0');
  digits.insert(0, "step-");
  if (number != 0) digits.append(".").append(std::to_string(number));
  return digits;
}

std::optional<fs::path> latest_of(const fs::path& run) {
  std::optional<fs::path> newest;
  for (const auto& [name, folder] : folders_of(run)) {
    if (fs::is_regular_file(folder / kIndex)) newest = folder;
  }
  return newest;
}

fs::path found(const fs::path& path) {
  return looked_at(path, [&] {
    const fs::path folder = fs::absolute(path);
    if (fs::is_regular_file(folder / kIndex)) return folder;
    if (const auto newest = latest_of(folder)) return *newest;
    throw Error(folder.string() + ": there is no complete checkpoint here");
  });
}

RunLock::RunLock(const fs::path& run) {
  no_save_under_way.acquire();
  try {
    file_ = locked_file(run);
  } catch (...) {
    no_save_under_way.release();
    throw;
  }
}

RunLock::~RunLock() {
  ::flock(file_, LOCK_UN);  // forked processes have the file open, too
  ::close(file_);
  no_save_under_way.release();
}

Writing::Writing(const fs::path& run, int64_t step) : lock_(run), run_(run) {
  name_ = {step, 0};
  for (const auto& [name, path] : folders_of(run)) {
    if (name.step == step) name_.number = name.number + 1;
  }
  for (const auto& entry : fs::directory_iterator(run)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kUnfinished) || name.starts_with(kRemoved)) remove_folder(entry.path());
  }
  std::string unfinished(kUnfinished);
  unfinished.append(name_.text()).append("-").append(std::to_string(std::random_device{}()));
  unfinished_ = run / unfinished;
  fs::create_directory(unfinished_);
}

Writing::~Writing() {
  std::error_code ignored;
  remove_tree(unfinished_, ignored);
}

void Writing::finish(std::optional<int64_t> keep) {
  flush(unfinished_);
  fs::rename(unfinished_, path());
  flush(run_);
  std::vector<fs::path> earlier;  // those of later steps stay: another run has saved them
  for (const auto& [name, other] : folders_of(run_)) {
    if (name == name_ || !fs::exists(other / kIndex)) continue;
    if (name.step == name_.step) {
      remove_folder(other);
    } else if (name.step < name_.step) {
      earlier.push_back(other);
    }
  }
  const auto old = keep ? static_cast<int64_t>(earlier.size()) - (*keep - 1) : 0;
  for (int64_t i = 0; i < old; ++i) remove_folder(earlier[static_cast<size_t>(i)]);
  const auto newest = latest_of(run_);
  if (newest != path()) {
    TORCH_WARN("save: ", name_.text(), " is not the latest checkpoint, which is ", newest->string(),
               "; a new run needs a folder of its own");
  }
}

}  // namespace ampfuse::checkpoint::detail
