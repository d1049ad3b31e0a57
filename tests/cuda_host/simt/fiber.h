// A stack and a sanitizer identity, on which one CUDA thread runs.
#pragma once

#include <cstddef>
#include <span>

namespace simt {

class Fiber {
 public:
  // Represents the host thread that constructs it.
  Fiber();
  // `main` starts at the first switch to this fiber and must never return.
  explicit Fiber(void (*main)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Suspends the caller, which must be running on this fiber, until another fiber switches back.
  // `finished` means that only the frame of `main` on this stack is needed again.
  void switch_to(Fiber& next, bool finished = false);

  // Sets the name of this fiber in ThreadSanitizer's reports.
  void set_name(const char* name);

  // For ThreadSanitizer, makes everything that any fiber of `before` did so far happen before
  // everything that any of `after` does next. They may be suspended. Switching alone orders
  // nothing. This fiber must know what all of `before` know after the call, so it is one of
  // `after`, or the only one of `before`.
  void order(std::span<Fiber* const> before, std::span<Fiber* const> after);

 private:
  void start();
  static void arrive();

  void* jump_[5];  // __builtin_setjmp's buffer
  void (*main_)() = nullptr;
  bool started_ = false;
  void* mapping_ = nullptr;  // guard page, then the stack
  const void* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;  // AddressSanitizer's fake stack, while suspended
  void* tsan_ = nullptr;
};

// While an IgnoreScope exists, ThreadSanitizer ignores what the running fiber allocates, frees and
// accesses: the runtime's own memory needs no checks, and shared arrays start without a history.
class IgnoreScope {
 public:
  IgnoreScope();
  ~IgnoreScope();
};

// Order memory for ThreadSanitizer, as a release or acquire of an atomic variable at `address`.
void release(const void* address);
void acquire(const void* address);

}  // namespace simt
