// exported_model PACKAGE runs a compiled model, and prints dtype and value of each loss.
#include <ATen/ATen.h>
#include <ampfuse/build_info.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

constexpr int kRows = 9;

int main(int, char** arguments) {
  const c10::InferenceMode inference;
  // The package calls operators of ampfuse. This call makes the linker keep the library.
  std::cout << ampfuse::build_info().version << std::endl;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const at::Tensor features = at::linspace(-2, 2, kRows * 8).reshape({kRows, 8});
  const at::Tensor target = at::arange(kRows) * 7 % 11;
  for (const at::Tensor& loss : model.run({features, target})) {
    std::cout << loss.scalar_type() << " " << loss.item<float>() << std::endl;
  }
}
