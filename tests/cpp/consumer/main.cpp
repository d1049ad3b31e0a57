#include <ampfuse/ampfuse.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  torch::nn::Linear model(4, 1);
  model->forward(torch::ones({8, 4})).sum().backward();
  const torch::Tensor norm = ampfuse::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0);
  std::cout << "ampfuse " << ampfuse::build_info().version << " norm " << norm.item<float>()
            << "\n";
}
