// A stack and a sanitizer identity: what one CUDA thread runs on.
#pragma once

#include <cstddef>
#include <span>

namespace simt {

class Fiber {
 public:
  // Stands for the thread that constructs it.
  Fiber();
  // `main` starts at the first switch to this fiber and must never return.
  explicit Fiber(void (*main)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Suspends the caller, which must be running on this fiber, until somebody switches back.
  // `finished`: nothing on this stack is needed again but the frame of `main`.
  void switch_to(Fiber& next, bool finished = false);

  // How ThreadSanitizer's reports call this fiber.
  void set_name(const char* name);

  // What any of `fibers` did so far happens before what any of them does next (ThreadSanitizer
  // only). Any of them may be suspended; switching alone orders nothing.
  static void synchronise(std::span<Fiber* const> fibers);

 private:
  void start();
  static void arrive();

  void* jump_[5];  // __builtin_setjmp's buffer
  void (*main_)() = nullptr;
  bool started_ = false;
  void* mapping_ = nullptr;  // guard page, then the stack
  const void* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;  // AddressSanitizer's, while suspended
  void* tsan_ = nullptr;
};

// While alive, ThreadSanitizer neither records nor checks what the running fiber allocates or
// frees: the memory belongs to the runtime, or starts without a history.
class IgnoreScope {
 public:
  IgnoreScope();
  ~IgnoreScope();
};

// An edge through the memory at `address`, as an atomic variable there would make it.
void release(const void* address);
void acquire(const void* address);

}  // namespace simt
