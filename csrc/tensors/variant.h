// Ways to compute something that are off, so that one build can be tried with and without them.
#pragma once

#include <string_view>

namespace ampfuse {

/// True if the environment variable AMPFUSE_VARIANT, a list with commas, has this name. It is read
/// once. Results must be right with any variant. A variant becomes the default, or is deleted, when
/// it has been measured on the hardware that it is for.
bool has_variant(std::string_view name);

}  // namespace ampfuse
