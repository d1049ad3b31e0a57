// The reasons why stored state does not fit an object.
#pragma once

#include <string>
#include <vector>

#include "json.h"

namespace ampfuse::checkpoint::detail {

using Mistakes = std::vector<std::string>;

/// Returns the first few mistakes as one text.
std::string text_of(const Mistakes& mistakes);

/// Returns whether the stored state is that of this class. Otherwise adds a mistake.
bool check_class(const std::string& own, const at::IValue& part, Mistakes& mistakes);

}  // namespace ampfuse::checkpoint::detail
