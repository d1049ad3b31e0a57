// The text of JSON. Its values are IValues: None, bools, numbers, strings, lists, and dicts with
// strings as keys.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>

namespace ampfuse::checkpoint::detail {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

Dict new_dict();
List new_list();

/// Throws Error for a string that is not UTF-8. Numbers must be finite.
std::string to_json(const at::IValue& value);

/// Returns the value of a text, and {"$int": digits} for an integer that does not fit into int64.
/// Throws Error for a text that is not JSON.
at::IValue from_json(std::string_view text);

}  // namespace ampfuse::checkpoint::detail
