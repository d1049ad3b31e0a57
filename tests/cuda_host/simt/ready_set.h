// The threads of a block that can run, handed out in the order of a schedule.
#pragma once

#include <bit>
#include <cstdint>

#include "simt/launch.h"

namespace simt::runtime {

inline constexpr unsigned kMaxThreads = 1024;

// Knuth's linear congruential generator, defined here so that a seed gives the same numbers on
// every platform.
struct Random {
  std::uint64_t state;
  unsigned below(std::uint64_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>((state >> 33) % limit);
  }
};

class ReadySet {
 public:
  static constexpr unsigned kNone = ~0u;

  ReadySet(Schedule::Order order, unsigned threads, Random& random)
      : order_(order), threads_(threads), random_(random) {}

  void insert(unsigned thread) {
    const unsigned position = mirror(thread);
    words_[position / 64] |= std::uint64_t{1} << position % 64;
  }

  // Removes and returns a ready thread, or returns kNone. The search goes round the block from the
  // thread taken last, so that each gets one turn before any gets a second; with a random order it
  // starts at a random thread.
  unsigned take() {
    const unsigned start = order_ == Schedule::Order::random ? random_.below(threads_) : next_;
    for (unsigned step = 0; step <= kWords; ++step) {
      std::uint64_t& word = words_[(start / 64 + step) % kWords];
      const std::uint64_t candidates = step == 0 ? word & ~std::uint64_t{0} << start % 64 : word;
      if (candidates == 0) continue;
      const unsigned bit = static_cast<unsigned>(std::countr_zero(candidates));
      word &= ~(std::uint64_t{1} << bit);
      const unsigned position = (start / 64 + step) % kWords * 64 + bit;
      next_ = position + 1;
      return mirror(position);
    }
    return kNone;
  }

 private:
  static constexpr unsigned kWords = kMaxThreads / 64;

  unsigned mirror(unsigned thread) const {
    return order_ == Schedule::Order::reverse ? threads_ - 1 - thread : thread;
  }

  Schedule::Order order_;
  unsigned threads_;
  Random& random_;
  unsigned next_ = 0;
  std::uint64_t words_[kWords] = {};
};

}  // namespace simt::runtime
