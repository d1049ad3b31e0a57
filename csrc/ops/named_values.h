// Names for the arguments of operators. These are declarations only: CUDA sources include them, and
// the definition of an IValue takes nvcc more than a second in each of its passes over a source.
#pragma once

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace c10 {
struct IValue;
}

namespace ampfuse {

class NamedArguments;

/// Names and values of the arguments that an operator is called with.
using NamedValues = std::vector<std::pair<std::string_view, c10::IValue>>;

/// Finds a value by name; returns null if it is missing.
using FindValue = std::function<const c10::IValue*(const char* name)>;

}  // namespace ampfuse
