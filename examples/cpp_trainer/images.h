// Images that the program makes itself, so that the example needs no download.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <numbers>

struct Images {
  torch::Tensor pixels;  ///< float, [count, 3, 32, 32]
  torch::Tensor labels;  ///< int64, [count]
};

inline constexpr int64_t kClasses = 10;

/// Makes noisy stripes in two widths and five directions, which are the ten classes. Positions and
/// colors of the stripes are random. Equal seeds make equal images.
inline Images make_images(int64_t count, uint64_t seed) {
  torch::Generator random = at::detail::createCPUGenerator(seed);
  const torch::Tensor labels = torch::randint(kClasses, {count}, random, torch::kLong);
  const torch::Tensor width = torch::where(labels < 5, 4.0, 8.0);
  const torch::Tensor direction = labels.remainder(5) * (std::numbers::pi / 5);
  const auto per_image = [](const torch::Tensor& values) { return values.view({-1, 1, 1}); };

  const torch::Tensor position = torch::arange(32, torch::kFloat);
  const torch::Tensor along = per_image(direction.cos()) * position.view({1, 1, -1}) +
                              per_image(direction.sin()) * position.view({1, -1, 1});
  const torch::Tensor phase = torch::rand({count}, random, torch::kFloat);
  const torch::Tensor stripes =
      (2 * std::numbers::pi * (along / per_image(width) + per_image(phase))).sin();
  const torch::Tensor color = torch::randn({count, 3, 1, 1}, random, torch::kFloat);
  const torch::Tensor noise = torch::randn({count, 3, 32, 32}, random, torch::kFloat);
  return {(color * stripes.unsqueeze(1) + noise).to(torch::kFloat), labels};
}
