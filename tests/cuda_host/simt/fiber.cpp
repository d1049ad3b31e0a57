#include "simt/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "simt/sanitizers.h"

namespace simt {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;

// The two fibers of the current switch, for the code that resumes on the other stack.
Fiber* from = nullptr;
Fiber* to = nullptr;

std::size_t page_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

void* map_stack() {
  void* mapping = mmap(nullptr, page_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // Stacks grow down: the guard page below turns an overflow into a fault.
  if (mapping == MAP_FAILED || mprotect(mapping, page_bytes(), PROT_NONE) != 0)
    throw std::system_error(errno, std::generic_category(), "simt: mapping a fiber's stack");
  return mapping;
}

// Announces the switch to ThreadSanitizer. Without the flag, the switch itself would order the two
// fibers and hide every race.
void become(void* tsan_fiber) {
  if constexpr (kTsan) __tsan_switch_to_fiber(tsan_fiber, __tsan_switch_to_fiber_no_sync);
}

}  // namespace

Fiber::Fiber() : started_(true) {
  if constexpr (kTsan) tsan_ = __tsan_get_current_fiber();
}

Fiber::Fiber(void (*main)())
    : main_(main),
      mapping_(map_stack()),
      stack_(static_cast<char*>(mapping_) + page_bytes()),
      stack_bytes_(kStackBytes) {
  if constexpr (kTsan) tsan_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (!mapping_) return;
  // The frames of an abandoned kernel leave their red zones on the stack.
  if constexpr (kAsan) __asan_unpoison_memory_region(stack_, stack_bytes_);
  if constexpr (kTsan) __tsan_destroy_fiber(tsan_);
  munmap(mapping_, page_bytes() + kStackBytes);
}

// The builtin setjmp and longjmp take a few instructions. They do not save a signal mask, which
// costs swapcontext two system calls, and no sanitizer interceptor wipes the red zones of the stack
// that is left.
[[gnu::noinline]] void Fiber::switch_to(Fiber& next, bool finished) {
  from = this;
  to = &next;
  if constexpr (kAsan)
    __sanitizer_start_switch_fiber(finished ? nullptr : &fake_stack_, next.stack_,
                                   next.stack_bytes_);
  become(next.tsan_);
  if (__builtin_setjmp(jump_) == 0) {
    if (next.started_) __builtin_longjmp(next.jump_, 1);
    next.start();
  }
  arrive();
}

void Fiber::start() {
  started_ = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = static_cast<char*>(mapping_) + page_bytes();
  context.uc_stack.ss_size = stack_bytes_;
  context.uc_link = nullptr;
  makecontext(
      &context,
      [] {
        arrive();
        to->main_();
      },
      0);
  setcontext(&context);
}

// Runs first after a switch, on the new stack. It also records the bounds of the stack that was
// left, since the bounds of the host thread's stack are not known earlier.
void Fiber::arrive() {
  if constexpr (kAsan)
    __sanitizer_finish_switch_fiber(std::exchange(to->fake_stack_, nullptr), &from->stack_,
                                    &from->stack_bytes_);
}

void Fiber::set_name(const char* name) {
  if constexpr (kTsan) __tsan_set_fiber_name(tsan_, name);
}

void Fiber::order(std::span<Fiber* const> before, std::span<Fiber* const> after) {
  if constexpr (kTsan) {
    void* const self = __tsan_get_current_fiber();
    // The edge uses the address of this fiber. It already knows everything that earlier calls
    // released there, so no order arises between fibers that never met.
    for (Fiber* fiber : before) {
      become(fiber->tsan_);
      __tsan_release(this);
    }
    for (Fiber* fiber : after) {
      become(fiber->tsan_);
      __tsan_acquire(this);
    }
    become(self);
  }
}

IgnoreScope::IgnoreScope() {
  if constexpr (kTsan) __tsan_ignore_thread_begin();
}

IgnoreScope::~IgnoreScope() {
  if constexpr (kTsan) __tsan_ignore_thread_end();
}

void release(const void* address) {
  if constexpr (kTsan) __tsan_release(const_cast<void*>(address));
}

void acquire(const void* address) {
  if constexpr (kTsan) __tsan_acquire(const_cast<void*>(address));
}

}  // namespace simt
