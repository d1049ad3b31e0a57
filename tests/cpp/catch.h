// Includes Catch2 of either major version: v3 has several headers, v2 has one, and some names
// differ between them.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& part) {
  return Catch::Matchers::Contains(part);
}
#endif
