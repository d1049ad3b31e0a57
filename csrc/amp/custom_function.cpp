#include <ampfuse/autocast.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ampfuse {

namespace {

using torch::autograd::AutogradContext;

constexpr const char* kSaved = "ampfuse::AutocastState";

bool is_cast(const at::Tensor& tensor, at::DeviceType device_type) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
         tensor.device().type() == device_type;
}

AutocastState saved_state(const AutogradContext& context) {
  const auto saved = context.saved_data.find(kSaved);
  TORCH_CHECK(saved != context.saved_data.end(),
              "CustomBackward: expected a function whose forward has a CustomForward");
  const c10::ArrayRef<at::IValue> numbers = saved->second.toTupleRef().elements();
  return {static_cast<at::DeviceType>(numbers[0].toInt()), numbers[1].toBool(),
          static_cast<at::ScalarType>(numbers[2].toInt()), numbers[3].toBool()};
}

}  // namespace

CustomForward::CustomForward(AutogradContext& context, at::DeviceType device_type,
                             std::optional<at::ScalarType> cast_inputs)
    : device_type_(device_type) {
  AutocastState state = AutocastState::capture(device_type);
  if (cast_inputs && state.enabled) {
    cast_to_ = cast_inputs;
    off_.emplace(device_type, state.dtype, /*enabled=*/false);
    state.enabled = false;
  }
  context.saved_data[kSaved] =
      c10::ivalue::Tuple::create({static_cast<int64_t>(state.device_type), state.enabled,
                                  static_cast<int64_t>(state.dtype), state.cache_enabled});
}

at::Tensor CustomForward::cast(const at::Tensor& input) const {
  return cast_to_ && is_cast(input, device_type_) ? input.to(*cast_to_) : input;
}

CustomBackward::CustomBackward(const AutogradContext& context)
    : as_in_forward_(saved_state(context)) {}

}  // namespace ampfuse
