// Trains a convolutional network with ampfuse from C++: autocast, loss scaling, clipping, AdamW,
// and checkpoints from which the program goes on if it was stopped.
#include <ampfuse/ampfuse.h>
#include <ampfuse/checkpoint.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>

#include "images.h"

namespace {

constexpr int64_t kBatch = 64;
constexpr int64_t kStepsPerLine = 20;
constexpr int64_t kStepsPerCheckpoint = 50;

struct Flags {
  int64_t steps = 200;
  std::string precision = "float16";
  std::string out = "run";
};

const std::map<std::string, torch::ScalarType> kPrecisions = {
    {"float32", torch::kFloat}, {"bfloat16", torch::kBFloat16}, {"float16", torch::kHalf}};

Flags parse(int count, char** arguments) {
  Flags flags;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    const std::string value = i + 1 < count ? arguments[i + 1] : "";
    if (name == "--steps" && std::atoll(value.c_str()) > 0) {
      flags.steps = std::atoll(value.c_str());
    } else if (name == "--precision" && kPrecisions.contains(value)) {
      flags.precision = value;
    } else if (name == "--out" && !value.empty()) {
      flags.out = value;
    } else {
      std::printf("usage: %s [--steps N] [--precision float32|bfloat16|float16] [--out FOLDER]\n",
                  arguments[0]);
      std::exit(2);
    }
  }
  return flags;
}

torch::nn::Sequential make_model() {
  using namespace torch::nn;
  return Sequential(Conv2d(3, 16, 5), ReLU(), MaxPool2d(2), Conv2d(16, 32, 5), ReLU(), MaxPool2d(2),
                    Flatten(), Linear(32 * 5 * 5, 128), ReLU(), Linear(128, kClasses));
}

void train(const Flags& flags) {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const torch::ScalarType dtype = kPrecisions.at(flags.precision);
  torch::manual_seed(0);
  torch::nn::Sequential model = make_model();
  model->to(device);
  const Images training = make_images(4000, /*seed=*/1);
  const Images test = make_images(1000, /*seed=*/2);
  const torch::Tensor pixels = training.pixels.to(device), labels = training.labels.to(device);

  // Only float16 needs loss scaling. A scaler that is not enabled leaves losses and steps alone.
  // The scale grows after 50 steps without overflow, instead of 2000, since this run is short.
  const bool is_scaled = dtype == torch::kHalf;
  ampfuse::GradScaler scaler(
      ampfuse::GradScalerOptions().device(device).enabled(is_scaled).growth_interval(50));
  ampfuse::CrossEntropyLoss criterion(ampfuse::CrossEntropyOptions(), &scaler);
  ampfuse::AdamW optimizer(model->parameters(), ampfuse::AdamWOptions(1e-3).max_grad_norm(1.0));
  const auto forward = [&](const torch::Tensor& batch) {
    const ampfuse::AutocastGuard autocast(device.type(), dtype, dtype != torch::kFloat);
    return model->forward(batch);
  };

  // A checkpoint also restores the state of the random numbers, by which batches are chosen.
  namespace checkpoint = ampfuse::checkpoint;
  const checkpoint::Objects objects = {
      {"model", model}, {"optimizer", optimizer}, {"scaler", scaler}};
  int64_t start = 0;
  if (checkpoint::latest(flags.out)) {
    start = checkpoint::load(flags.out, objects).step;
    std::printf("resumed from step %ld\n", start);
  }

  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = start + 1; step <= flags.steps; ++step) {
    const torch::Tensor rows = torch::randint(pixels.size(0), {kBatch}, torch::kLong).to(device);
    optimizer.zero_grad();
    const torch::Tensor loss = criterion(forward(pixels.index({rows})), labels.index({rows}));
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    if (step % kStepsPerLine == 0 || step == flags.steps) {  // item() waits for a GPU
      std::printf("step %ld: loss %.6f, scale %g, norm %.4f\n", step, loss.item<double>(),
                  scaler.get_scale(), optimizer.grad_norm().item<double>());
      std::fflush(stdout);
    }
    if (step % kStepsPerCheckpoint == 0 || step == flags.steps) {
      checkpoint::save(flags.out, step, objects, checkpoint::SaveOptions().keep(2));
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;

  const torch::NoGradGuard no_grad;
  const torch::Tensor predicted = forward(test.pixels.to(device)).argmax(1).cpu();
  const double accuracy = (predicted == test.labels).to(torch::kDouble).mean().item<double>();
  std::printf("\n%-10s %-10s %8s %14s %14s\n", "device", "precision", "step", "test accuracy",
              "seconds/step");
  std::printf("%-10s %-10s %8ld %12.1f %%", device.str().c_str(), flags.precision.c_str(),
              std::max(start, flags.steps), 100 * accuracy);
  if (start < flags.steps) {
    std::printf(" %14.4f\n", seconds.count() / static_cast<double>(flags.steps - start));
  } else {
    std::printf(" %14s\n", "no step taken");
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    train(parse(count, arguments));
  } catch (const c10::Error& error) {  // of torch and ampfuse; what() has a backtrace, too
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {  // for example ampfuse::checkpoint::Error
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
