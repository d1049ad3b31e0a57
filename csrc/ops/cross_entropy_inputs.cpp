#include "cross_entropy_inputs.h"

#include <c10/core/GradMode.h>

#include "../tensors/device_scalars.h"
#include "../tensors/dtype_name.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

namespace {

void check_no_derivative(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && tensor.requires_grad()), op, ": ", name,
                    ": expected a tensor that does not require grad; detach() it");
}

}  // namespace

std::optional<at::Tensor> loss_scalar(const char* op, const char* name,
                                      const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                      at::Device device) {
  if (!scalar || !scalar->defined()) return std::nullopt;
  check_strided(op, name, *scalar);
  TORCH_CHECK_VALUE(scalar->sym_numel() == 1 && !scalar->is_complex(), op, ": ", name,
                    ": expected one number, got ", dtype_name(scalar->scalar_type()), " of shape ",
                    scalar->sym_sizes());
  check_memory(op, name, *scalar);
  check_no_derivative(op, name, *scalar);
  return on_device(*scalar, device).to(dtype).reshape({});
}

std::optional<at::Tensor> loss_class_weight(const char* op, const char* name,
                                            const std::optional<at::Tensor>& weight,
                                            const c10::SymInt& classes, at::ScalarType dtype,
                                            at::Device device) {
  if (!weight || !weight->defined()) return std::nullopt;
  check_strided(op, name, *weight);
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, op, ": ", name,
                    " tensor should be defined either for all ", classes,
                    " classes or no classes but got weight tensor of shape: ", weight->sym_sizes());
  TORCH_CHECK_TYPE(weight->is_floating_point(), op, ": ", name, ": expected a floating dtype, got ",
                   dtype_name(weight->scalar_type()));
  TORCH_CHECK_VALUE(weight->device() == device, op, ": ", name, ": expected device ", device,
                    ", got ", weight->device());
  check_memory(op, name, *weight);
  check_no_derivative(op, name, *weight);
  return weight->to(dtype).contiguous();
}

at::Tensor readable_probabilities(const at::Tensor& target, at::ScalarType loss_dtype) {
  const at::ScalarType dtype = target.scalar_type();
  const bool is_readable =
      dtype == loss_dtype || (loss_dtype == at::kFloat && dtype != at::kDouble);
  return is_readable ? target : target.to(loss_dtype);
}

at::Tensor correct_predictions(const at::Tensor& argmax, const at::Tensor& target,
                               int64_t ignore_index, int64_t class_dim) {
  if (target.is_floating_point()) {
    const bool has_classes = target.sym_size(class_dim) != 0;
    return has_classes ? argmax.eq(target.argmax(class_dim)) : argmax.ne(argmax);
  }
  // Compare as int64: in uint8 an ignore_index of -100 would be 156.
  const at::Tensor classes = target.reshape_symint(argmax.sym_sizes()).to(at::kLong);
  return argmax.eq(classes).logical_and(classes.ne(ignore_index));
}

}  // namespace ampfuse
