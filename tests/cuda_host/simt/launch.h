// Host side: launches of a kernel with a chosen order of threads and blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/runtime.h"

namespace simt {

// The error of a launch that CUDA would refuse, or of a kernel with undefined behaviour in CUDA.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The order in which threads run between two waits, and blocks one after another. CUDA promises no
// order, so a correct kernel gives the same result under every schedule.
struct Schedule {
  enum class Order { forward, reverse, random };
  Order order = Order::forward;
  std::uint64_t seed = 0;  // for Order::random

  std::string name() const;
};

namespace runtime {
inline Schedule current_schedule;
}

// Returns the schedule of the next launches; initially forward.
inline const Schedule& schedule() {
  return runtime::current_schedule;
}

// Launches follow `schedule` while this object exists.
class ScopedSchedule {
 public:
  explicit ScopedSchedule(const Schedule& schedule)
      : previous_(std::exchange(runtime::current_schedule, schedule)) {}
  ~ScopedSchedule() { runtime::current_schedule = previous_; }
  ScopedSchedule(const ScopedSchedule&) = delete;
  ScopedSchedule& operator=(const ScopedSchedule&) = delete;

 private:
  Schedule previous_;
};

template <class Body>
void for_each_schedule(Body&& body, std::uint64_t seed = 1) {
  using enum Schedule::Order;
  for (const Schedule& each : {Schedule{forward}, Schedule{reverse}, Schedule{random, seed}}) {
    const ScopedSchedule scope(each);
    body();
  }
}

namespace runtime {

// Every thread copies the kernel's arguments, up to 32 KB. ThreadSanitizer's memcpy would check
// each byte, which takes 12 ms per block of 256 threads. An inline copy that it does not instrument
// takes 1 ms.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SIMT_UNSEEN_COPY __attribute__((target("inline-all-stringops"), no_sanitize("thread")))
#else
#define SIMT_UNSEEN_COPY
#endif

template <class... Parameters, std::size_t... i>
SIMT_UNSEEN_COPY void call(void (*kernel)(Parameters...),
                           const std::tuple<Parameters...>& parameters, std::index_sequence<i...>) {
  kernel(std::get<i>(parameters)...);
}

}  // namespace runtime

// Runs kernel<<<grid, block, dynamic_shared_bytes>>>(arguments...) and waits for it.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block,
            std::size_t dynamic_shared_bytes, const Arguments&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((std::is_trivially_copyable_v<Parameters> && ...),
                "CUDA copies kernel arguments byte by byte");
  static_assert((sizeof(Parameters) + ... + 0) <= 32764,
                "kernel arguments are limited to 32,764 bytes (CUDA 12.1, compute capability 7.0)");
  struct Bound {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } bound{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
  const auto invoke = [](void* opaque) {
    const Bound& self = *static_cast<const Bound*>(opaque);
    runtime::call(self.kernel, self.parameters, std::index_sequence_for<Parameters...>());
  };
  runtime::run({{invoke, &bound}, grid, block, dynamic_shared_bytes, schedule()});
}

}  // namespace simt

// Defines what the launches of the library use instead of CUDA's brackets.
#define AMPFUSE_LAUNCH(kernel, blocks, threads, shared, stream) \
  [&](const auto&... arguments) { simt::launch(kernel, blocks, threads, shared, arguments...); }
