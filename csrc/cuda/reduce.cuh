// Teams as Workers for math/: they join norms, in an order fixed by the number of threads alone.
#pragma once

#include "../math/multi_tensor_norm.h"
#include "team.cuh"

namespace ampfuse {

template <typename Team>
class TeamWorkers {
 public:
  // `scratch`: what the team needs of shared memory.
  __device__ explicit TeamWorkers(double* scratch = nullptr) : team_(scratch) {}
  __device__ int index() const { return team_.index(); }
  __device__ int count() const { return Team::kSize; }

  // Everyone gets the same result: each pair joins the same two numbers.
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
