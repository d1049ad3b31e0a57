#include "variant.h"

#include <cstdlib>
#include <string>

namespace ampfuse {

bool has_variant(std::string_view name) {
  static const std::string names = [] {
    const char* const setting = std::getenv("AMPFUSE_VARIANT");
    return std::string(setting == nullptr ? "" : setting);
  }();
  std::string_view rest = names;
  for (;;) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == name) return true;
    if (comma == std::string_view::npos) return false;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace ampfuse
