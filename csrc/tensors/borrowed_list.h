// Kernels that take tensor lists where the dispatcher has put them. A list of its own for each
// kernel, as torch makes it, counts a reference to every tensor: for those that Python owns too
// that takes Python's lock, twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace ampfuse {

/// A view of a list on the dispatcher's stack.
class BorrowedList {
 public:
  explicit BorrowedList(const c10::IValue& list) {
    const c10::ArrayRef<c10::IValue> items = list.toListRef();
    tensors_.reserve(items.size());
    for (const c10::IValue& item : items) tensors_.push_back(Traits::createBorrow(item.toTensor()));
  }
  ~BorrowedList() {
    for (at::Tensor& tensor : tensors_) Traits::destroyBorrow(tensor);
  }
  BorrowedList(const BorrowedList&) = delete;
  BorrowedList& operator=(const BorrowedList&) = delete;

  at::TensorList get() const { return tensors_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  std::vector<at::Tensor> tensors_;
};

template <typename T>
struct StackArgument;

template <>
struct StackArgument<at::TensorList> {
  explicit StackArgument(const c10::IValue& value) : list(value) {}
  at::TensorList get() const { return list.get(); }
  BorrowedList list;
};

template <>
struct StackArgument<const at::Tensor&> {
  explicit StackArgument(const c10::IValue& value) : tensor(value.toTensor()) {}
  const at::Tensor& get() const { return tensor; }
  const at::Tensor& tensor;
};

template <>
struct StackArgument<double> {
  explicit StackArgument(const c10::IValue& value) : number(value.toDouble()) {}
  double get() const { return number; }
  double number;
};

template <>
struct StackArgument<std::optional<at::ScalarType>> {
  explicit StackArgument(const c10::IValue& value) : dtype(value.toOptional<at::ScalarType>()) {}
  std::optional<at::ScalarType> get() const { return dtype; }
  std::optional<at::ScalarType> dtype;
};

template <auto kKernel>
struct BorrowingKernel;

template <typename Result, typename... Args, Result (*kKernel)(Args...)>
struct BorrowingKernel<kKernel> {
  static void call(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    call(stack, std::index_sequence_for<Args...>());
  }

 private:
  template <size_t... kIndices>
  static void call(torch::jit::Stack* stack, std::index_sequence<kIndices...>) {
    const auto run = [stack] {
      const c10::IValue* first = stack->data() + stack->size() - sizeof...(Args);
      const std::tuple<StackArgument<Args>...> arguments(first[kIndices]...);
      return kKernel(std::get<kIndices>(arguments).get()...);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      torch::jit::drop(*stack, sizeof...(Args));
    } else {
      Result results = run();
      torch::jit::drop(*stack, sizeof...(Args));
      std::apply([stack](auto&... result) { torch::jit::push(*stack, std::move(result)...); },
                 results);
    }
  }
};

/// A function of lists, tensors and numbers as a kernel.
template <auto kKernel>
torch::CppFunction borrowing_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&BorrowingKernel<kKernel>::call>();
}

}  // namespace ampfuse
