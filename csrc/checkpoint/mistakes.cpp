#include "mistakes.h"

#include <algorithm>

namespace ampfuse::checkpoint::detail {

namespace {

constexpr size_t kMostMistakes = 5;  // in a message

}  // namespace

std::string text_of(const Mistakes& mistakes) {
  std::string text;
  for (size_t i = 0; i < std::min(mistakes.size(), kMostMistakes); ++i) {
    text.append(i ? "; " : "").append(mistakes[i]);
  }
  const size_t more = mistakes.size() - std::min(mistakes.size(), kMostMistakes);
  if (more) text.append("; and ").append(std::to_string(more)).append(" more");
  return text;
}

bool check_class(const std::string& own, const at::IValue& part, Mistakes& mistakes) {
  std::string stored = "another object";
  if (part.isGenericDict() && part.toGenericDict().contains("class")) {
    stored = part.toGenericDict().at("class").toStringRef();
  }
  if (stored == own) return true;
  mistakes.push_back("the checkpoint has the state of " + stored + ", not of " + own);
  return false;
}

}  // namespace ampfuse::checkpoint::detail
