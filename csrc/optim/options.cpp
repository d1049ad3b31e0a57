#include "options.h"

#include <cmath>

#include "../tensors/dtype_name.h"

namespace ampfuse {

std::ostream& operator<<(std::ostream& stream, MasterWeights kind) {
  if (kind == MasterWeights::kOff) return stream << "kOff";
  if (kind == MasterWeights::kStochastic) return stream << "kStochastic";
  return stream << (kind == MasterWeights::kAuto ? "kAuto" : "kRemainder");
}

namespace optim {

void check_settings(const GroupSettings& settings, const char* dtype_option) {
  TORCH_CHECK_VALUE(std::isfinite(settings.lr), "Invalid learning rate: ", settings.lr);
  TORCH_CHECK_VALUE(std::isfinite(settings.weight_decay),
                    "Invalid weight_decay value: ", settings.weight_decay);
  const at::ScalarType dtype = settings.moment_dtype;
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kChar,
                    dtype_option, ": expected float32, bfloat16 or int8 for 8 bits, got ",
                    dtype_name(dtype));
  check_max_grad_norm(settings.max_grad_norm);
}

void check_initial(const GroupSettings& settings) {
  TORCH_CHECK_VALUE(settings.lr >= 0, "Invalid learning rate: ", settings.lr);
  TORCH_CHECK_VALUE(settings.weight_decay >= 0,
                    "Invalid weight_decay value: ", settings.weight_decay);
}

void check_ema(std::optional<double> decay, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!decay || (*decay >= 0 && *decay < 1),
                    "ema: expected a decay from 0 to less than 1, got ", decay.value_or(0));
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16,
                    "ema_dtype: expected float32 or bfloat16, got ", dtype_name(dtype));
}

void check_max_grad_norm(std::optional<double> max_grad_norm) {
  TORCH_CHECK_VALUE(!max_grad_norm || *max_grad_norm >= 0,
                    "max_grad_norm: expected None or at least 0, got ", *max_grad_norm);
}

}  // namespace optim

}  // namespace ampfuse
