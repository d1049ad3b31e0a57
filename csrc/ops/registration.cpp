#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <link.h>

#include <string>

namespace ampfuse {

namespace {

std::string own_path() {
  Dl_info info = {};
  dladdr(reinterpret_cast<const void*>(&is_only_build), &info);
  return info.dli_fname == nullptr ? "" : info.dli_fname;
}

// Returns the path of the other loaded build.
std::string other_path() {
  std::string found;
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    const std::string path = info->dlpi_name;
    if (path.find("libampfuse") == std::string::npos || path == own_path()) return 0;
    *static_cast<std::string*>(data) = path;
    return 1;
  };
  dl_iterate_phdr(visit, &found);
  return found;
}

}  // namespace

bool is_only_build() {
  static const bool is_only = [] {
    if (!c10::Dispatcher::singleton().findSchema({"ampfuse::update_scale", ""})) return true;
    TORCH_WARN("two builds of ampfuse are loaded in one process: ", other_path(), ", and then ",
               own_path(),
               ". Only the operators of the first one are used. Link all code against the ",
               "first one, or load the second one in another process");
    return false;
  }();
  return is_only;
}

}  // namespace ampfuse
