// One step of SGD, rounded where torch rounds.
//
// g is the gradient, b is the momentum buffer, μ the momentum and d the dampening:
//
//   g ← g + wd·p
//   b ← μ·b + (1−d)·g        first step: b ← g
//   p ← p − lr·b             Nesterov: p ← p − lr·(g + μ·b)        without momentum: p ← p − lr·g
#pragma once

#include "fused_step.h"

namespace ampfuse::math {

enum SgdColumn { kMomentumBuffer = kFirstMoment };

struct SgdOptions {
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
};

template <typename acc_t>
struct SgdConstants {
  acc_t momentum;
  acc_t one_minus_dampening;
  acc_t l2;
  bool nesterov;

  AMPFUSE_HOST_DEVICE explicit SgdConstants(const SgdOptions& options)
      : momentum(static_cast<acc_t>(options.momentum)),
        one_minus_dampening(static_cast<acc_t>(1 - options.dampening)),
        l2(static_cast<acc_t>(options.weight_decay)),
        nesterov(options.nesterov) {}
};

template <typename acc_t>
struct SgdStep {
  acc_t lr;
  bool starts_momentum;  // the buffer is not read: it takes the gradient, undampened as in torch

  template <typename other_t>
  AMPFUSE_HOST_DEVICE SgdStep<other_t> as() const {
    return {static_cast<other_t>(lr), starts_momentum};
  }
};

struct SgdRule {
  static constexpr int kMoments = 1;
  static constexpr int kCounts[] = {0, 1};  // without and with momentum
  using Options = SgdOptions;
  template <typename acc_t>
  using Constants = SgdConstants<acc_t>;
  template <typename acc_t>
  using Step = SgdStep<acc_t>;

  template <typename acc_t>
  static AMPFUSE_HOST_DEVICE SgdStep<acc_t> step(const SgdOptions&, double lr, double count) {
    return {static_cast<acc_t>(lr), count == 1};
  }

  // μ·b is rounded by itself: torch multiplies the buffers in a pass of their own.
  template <int kCount, typename V, typename acc_t>
  static AMPFUSE_HOST_DEVICE StepElement<V, kCount> update(StepElement<V, kCount> x, V grad,
                                                           const SgdConstants<acc_t>& constants,
                                                           const SgdStep<acc_t>& step) {
    using L = Lane<V>;
    if (constants.l2 != 0) grad = L::multiply_add(V(constants.l2), x.param, grad);
    if constexpr (kCount == 1) {
      V& buffer = x.moments[0];
      buffer = step.starts_momentum ? grad
                                    : L::multiply_add(V(constants.one_minus_dampening), grad,
                                                      L::product(V(constants.momentum), buffer));
      grad = constants.nesterov ? L::multiply_add(V(constants.momentum), buffer, grad) : buffer;
    }
    x.param = L::multiply_add(V(-step.lr), grad, x.param);
    return x;
  }
};

}  // namespace ampfuse::math
