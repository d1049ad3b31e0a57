// Catch2, whichever major version is installed: v3 splits its header, v2 is one file, and some
// names moved between them.
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
