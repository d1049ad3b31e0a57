#include "../ops/cross_entropy_kernels.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

constexpr CrossEntropyKernels kCrossEntropyShapes = {
    /*weigh=*/nullptr,
    [](const CrossEntropyArguments&, const std::optional<at::Tensor>&,
       const std::optional<at::Tensor>&, const CrossEntropyOutputs&) {},
    [](const CrossEntropyArguments&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
       const at::Tensor&) {},
    [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {}};

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  register_cross_entropy<kCrossEntropyShapes>(m);
}

}  // namespace ampfuse
