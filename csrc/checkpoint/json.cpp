#include "json.h"

#include <ampfuse/checkpoint.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

namespace ampfuse::checkpoint::detail {

namespace {

constexpr int kMostDepth = 500;  // of lists and dicts in each other, so that the stack suffices

// Returns the number of bytes of the character at the front of a text, or 0 if it is not UTF-8.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = byte(0) < 0x80 ? 1 : byte(0) < 0xE0 ? 2 : byte(0) < 0xF0 ? 3 : 4;
  if (length == 1) return 1;
  if (text.size() < length || byte(0) < 0xC2 || byte(0) > 0xF4) return 0;
  uint32_t point = byte(0) & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0u) != 0x80) return 0;
    point = point << 6 | (byte(i) & 0x3Fu);
  }
  const bool is_surrogate = point >= 0xD800 && point < 0xE000;
  const bool is_too_long = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
  return is_surrogate || is_too_long || point > 0x10FFFF ? 0 : length;
}

void append_utf8(uint32_t point, std::string& text) {
  const auto append = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (point < 0x80) return append(point);
  const uint32_t more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;  // bytes after the first
  append((0xFF00u >> (more + 1) & 0xFFu) | point >> 6 * more);
  for (uint32_t i = more; i-- > 0;) append(0x80u | (point >> 6 * i & 0x3Fu));
}

void write_string(const std::string& value, std::string& text) {
  text += '"';
  for (std::string_view rest = value; !rest.empty();) {
    const size_t length = utf8_length(rest);
    if (length == 0) throw Error("save: expected texts in UTF-8, got " + value);
    const auto byte = static_cast<unsigned char>(rest.front());
    if (byte == '"' || byte == '\\') text += '\\';
    if (byte < 0x20) {
      text += "\\u00";
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    } else {
      text += rest.substr(0, length);
    }
    rest.remove_prefix(length);
  }
  text += '"';
}

void write_double(double value, std::string& text) {
  char digits[32];
  const std::string_view shortest(digits, std::to_chars(digits, digits + 32, value).ptr - digits);
  text += shortest;
  if (shortest.find_first_of(".e") == std::string_view::npos) text += ".0";
}

void write(const at::IValue& value, std::string& text) {
  const char* separator = "";
  if (value.isNone()) {
    text += "null";
  } else if (value.isBool()) {
    text += value.toBool() ? "true" : "false";
  } else if (value.isInt()) {
    text += std::to_string(value.toInt());
  } else if (value.isDouble()) {
    write_double(value.toDouble(), text);
  } else if (value.isString()) {
    write_string(value.toStringRef(), text);
  } else if (value.isList()) {
    text += '[';
    for (const at::IValue& item : value.toListRef()) {
      text += std::exchange(separator, ",");
      write(item, text);
    }
    text += ']';
  } else {
    text += '{';
    for (const auto& entry : value.toGenericDict()) {
      text += std::exchange(separator, ",");
      write_string(entry.key().toStringRef(), text);
      text += ':';
      write(entry.value(), text);
    }
    text += '}';
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  at::IValue whole() {
    at::IValue result = value(0);
    skip_spaces();
    if (at_ != text_.size()) fail();
    return result;
  }

 private:
  [[noreturn]] void fail() const {
    throw Error("expected JSON, which ends at byte " + std::to_string(at_));
  }

  void skip_spaces() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  bool take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  bool take_after_spaces(std::string_view token) {
    skip_spaces();
    return take(token);
  }

  void expect(std::string_view token) {
    if (!take_after_spaces(token)) fail();
  }

  at::IValue value(int depth) {
    if (depth > kMostDepth) fail();
    skip_spaces();
    if (take("null")) return {};
    if (take("true")) return true;
    if (take("false")) return false;
    if (take("\"")) return string();
    if (take("[")) return list(depth);
    if (take("{")) return dict(depth);
    return number();
  }

  List list(int depth) {
    List result = new_list();
    if (take_after_spaces("]")) return result;
    do {
      result.push_back(value(depth + 1));
    } while (take_after_spaces(","));
    expect("]");
    return result;
  }

  Dict dict(int depth) {
    Dict result = new_dict();
    if (take_after_spaces("}")) return result;
    do {
      expect("\"");
      std::string key = string();
      expect(":");
      result.insert_or_assign(std::move(key), value(depth + 1));
    } while (take_after_spaces(","));
    expect("}");
    return result;
  }

  at::IValue number() {
    const size_t end = std::min(text_.find_first_not_of("+-.0123456789eE", at_), text_.size());
    const std::string_view digits = text_.substr(at_, end - at_);
    const auto parsed = [&](auto number) -> std::optional<decltype(number)> {
      const auto [stop, error] = std::from_chars(digits.begin(), digits.end(), number);
      if (error == std::errc::result_out_of_range) return std::nullopt;
      if (error != std::errc() || stop != digits.end()) fail();
      return number;
    };
    at::IValue result;
    if (digits.find_first_of(".eE") != std::string_view::npos) {
      const auto real = parsed(double());
      if (!real) fail();
      result = *real;
    } else if (const auto integer = parsed(int64_t())) {
      result = *integer;
    } else {
      Dict too_large = new_dict();
      too_large.insert("$int", std::string(digits));
      result = too_large;
    }
    at_ = end;
    return result;
  }

  // Returns the string whose quote has just been read.
  std::string string() {
    std::string result;
    while (!take("\"")) {
      const size_t end = text_.find_first_of("\"\\", at_);
      if (end == std::string_view::npos) fail();
      result += text_.substr(at_, end - at_);
      at_ = end;
      if (take("\\")) escape(result);
    }
    return result;
  }

  void escape(std::string& result) {
    const char letter = at_ < text_.size() ? text_[at_++] : '\0';
    const std::string_view letters = "\"\\/bfnrt";
    if (const size_t i = letters.find(letter); i != std::string_view::npos) {
      result += "\"\\/\b\f\n\r\t"[i];
      return;
    }
    if (letter != 'u') fail();
    uint32_t point = hexadecimal();
    if (point >= 0xD800 && point < 0xDC00 && take("\\u")) {  // two surrogates are one character
      point = 0x10000 + ((point - 0xD800) << 10) + (hexadecimal() - 0xDC00);
    }
    append_utf8(point, result);
  }

  uint32_t hexadecimal() {
    const std::string_view digits = text_.substr(at_, 4);
    uint32_t result = 0;
    const char* const stop = std::from_chars(digits.begin(), digits.end(), result, 16).ptr;
    if (digits.size() < 4 || stop != digits.end()) fail();
    at_ += 4;
    return result;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Dict new_dict() {
  return Dict(c10::AnyType::get(), c10::AnyType::get());
}

List new_list() {
  return List(c10::AnyType::get());
}

std::string to_json(const at::IValue& value) {
  std::string text;
  write(value, text);
  return text;
}

at::IValue from_json(std::string_view text) {
  return Parser(text).whole();
}

}  // namespace ampfuse::checkpoint::detail
