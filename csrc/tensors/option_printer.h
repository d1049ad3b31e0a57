// Prints options in the form name=value.
#pragma once

#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <ostream>
#include <tuple>

namespace ampfuse {

/// Prints each option that it is called with. Options without a value are left out.
class OptionPrinter {
 public:
  explicit OptionPrinter(std::ostream& stream) : stream_(stream) {}

  template <typename T>
  void operator()(const char* name, const T& value) {
    stream_ << separator_ << name << "=" << value;
    separator_ = ", ";
  }
  void operator()(const char* name, bool value) { (*this)(name, value ? "true" : "false"); }
  void operator()(const char* name, const std::tuple<double, double>& pair) {
    (*this)(name, c10::str("(", std::get<0>(pair), ", ", std::get<1>(pair), ")"));
  }
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) {
    if (value) (*this)(name, *value);
  }
  template <typename T>
  void operator()(const char* name, const c10::intrusive_ptr<T>& value) {
    if (value) (*this)(name, static_cast<const void*>(value.get()));
  }

 private:
  std::ostream& stream_;
  const char* separator_ = "";
};

}  // namespace ampfuse
