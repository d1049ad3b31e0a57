// torch and Catch2 together, and the devices tests run on.
#pragma once

#include <ampfuse/build_info.h>
#include <torch/torch.h>

#include <cstdlib>
#include <stdexcept>
#include <vector>

// torch's logging has a CHECK that ends the process; the tests mean Catch2's.
#undef CHECK
#include "catch.h"

/// The CPU, and CUDA where the library and the machine have it.
/// With FAIL_WITHOUT_CUDA set a missing GPU is a failure, so that a GPU job can't pass by testing
/// the CPU alone.
inline std::vector<torch::Device> devices() {
  std::vector<torch::Device> found = {torch::kCPU};
  if (ampfuse::has_cuda() && torch::cuda::is_available()) {
    found.emplace_back(torch::kCUDA);
  } else if (std::getenv("FAIL_WITHOUT_CUDA") != nullptr) {
    throw std::runtime_error("FAIL_WITHOUT_CUDA is set and there is no GPU, or no CUDA build");
  }
  return found;
}
