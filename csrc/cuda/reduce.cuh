// Teams as workers for math/multi_tensor_norm.h. They join norms in an order that depends only on
// the number of threads.
#pragma once

#include "../math/multi_tensor_norm.h"
#include "team.cuh"

namespace ampfuse {

template <typename Team>
class TeamWorkers {
 public:
  // `scratch` is the shared memory that the team needs; null for a warp.
  __device__ explicit TeamWorkers(double* scratch = nullptr) : team_(scratch) {}
  __device__ int index() const { return team_.index(); }
  __device__ int count() const { return Team::kSize; }

  // All threads get the same result: both threads of a pair join the same two numbers.
  template <math::NormType kNorm>
  __device__ double join(double x) const {
    return team_.joined(x, [](double a, double b) { return math::norm_join<kNorm>(a, b); });
  }

 private:
  Team team_;
};

using WarpWorkers = TeamWorkers<WarpTeam>;
using BlockWorkers = TeamWorkers<BlockTeam<kThreads>>;

}  // namespace ampfuse
