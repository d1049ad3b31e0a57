#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "simt/block.h"

namespace simt {

std::string Schedule::name() const {
  if (order == Order::random) return "random, seed " + std::to_string(seed);
  return order == Order::forward ? "forward" : "reverse";
}

namespace runtime {
namespace {

std::string doing(const Thread& thread) {
  if (thread.state == Thread::State::ready) return "can run";
  if (thread.state == Thread::State::exited) return "exited";
  std::string text = std::string("wait in ") + thread.call;
  if (thread.state == Thread::State::in_warp) text += ", mask " + hexadecimal(thread.mask);
  return text + ", " + to_string(thread.where);
}

}  // namespace

bool same_line(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string to_string(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

std::string hexadecimal(unsigned value) {
  char text[11];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

std::string describe(std::span<const Thread> threads) {
  std::string text;
  for (std::size_t base = 0; base < threads.size(); base += warpSize) {
    const auto warp = threads.subspan(base, std::min<std::size_t>(warpSize, threads.size() - base));
    std::string seen[warpSize];
    for (std::size_t i = 0; i < warp.size(); ++i) seen[i] = doing(warp[i]);
    unsigned told = 0;
    for (std::size_t i = 0; i < warp.size(); ++i) {
      if (told >> i & 1) continue;
      unsigned lanes = 0;
      for (std::size_t j = i; j < warp.size(); ++j)
        if (seen[j] == seen[i]) lanes |= 1u << j;
      told |= lanes;
      text += "\n  warp " + std::to_string(base / warpSize) + ", lanes " + hexadecimal(lanes) +
              " (" + std::to_string(std::popcount(lanes)) + "): " + seen[i];
      const unsigned absent = warp[i].mask & ~lanes;
      if (warp[i].state == Thread::State::in_warp && absent != 0)
        text += ", for lanes " + hexadecimal(absent);
    }
  }
  return text;
}

}  // namespace runtime
}  // namespace simt
