// Types for arguments with names. IValue is only declared, since CUDA sources include this file:
// its definition takes nvcc more than a second in each pass over a source.
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
