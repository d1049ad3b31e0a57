// Includes torch and Catch2 together, lists the devices that tests run on, and collects warnings.
#pragma once

#include <ampfuse/build_info.h>
#include <torch/torch.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

// torch's logging defines a CHECK that ends the process; tests use Catch2's CHECK.
#undef CHECK
#include "catch.h"

/// Returns the CPU, and CUDA if both the library and the machine support it.
/// With FAIL_WITHOUT_CUDA set, a missing GPU throws, so that a GPU job cannot pass by testing the
/// CPU alone.
inline std::vector<torch::Device> devices() {
  std::vector<torch::Device> found = {torch::kCPU};
  if (ampfuse::has_cuda() && torch::cuda::is_available()) {
    found.emplace_back(torch::kCUDA);
  } else if (std::getenv("FAIL_WITHOUT_CUDA") != nullptr) {
    throw std::runtime_error("FAIL_WITHOUT_CUDA is set and there is no GPU, or no CUDA build");
  }
  return found;
}

/// Collects warnings instead of printing them, under a WarningHandlerGuard.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};
