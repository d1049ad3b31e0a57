#include "cross_entropy_target_check.h"

namespace ampfuse {

namespace {

void (*look)() = nullptr;  // null without CUDA: a CPU checks targets before it uses them

}  // namespace

void check_targets() {
  if (look != nullptr) look();
}

void set_target_check(void (*check)()) {
  look = check;
}

}  // namespace ampfuse
