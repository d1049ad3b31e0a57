#include "../ops/linear_cross_entropy_kernels.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

constexpr LinearCrossEntropyKernels kLinearCrossEntropyShapes = {
    [](const LinearCrossEntropyArguments& arguments, const std::optional<at::Tensor>&,
       const std::optional<at::Tensor>&, const LinearGradientMask& wanted, bool with_metrics) {
      auto outputs = empty_linear_outputs(arguments, wanted, with_metrics);
      if (!arguments.options.is_per_row()) {
        outputs.gradients = empty_linear_gradients(arguments, wanted);
      }
      return outputs;
    },
    [](const at::Tensor&, const LinearCrossEntropyArguments& arguments, const at::Tensor&,
       const at::Tensor&,
       const LinearGradientMask& wanted) { return empty_linear_gradients(arguments, wanted); }};

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  register_linear_cross_entropy<kLinearCrossEntropyShapes>(m);
}

}  // namespace ampfuse
