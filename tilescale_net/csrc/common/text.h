// Text of several parts, and names of expressions.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

namespace tsn {

// The parts one after the other: text as it is, numbers in decimal.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) out += std::to_string(part);
    else out += part;
  };
  (add(parts), ...);
  return out;
}

// Some expressions behind their text, whose reader takes the last name of each with next_name: `o.rank` is "rank".
#define TSN_NAMED(...) #__VA_ARGS__, __VA_ARGS__

// The first name in such a text, which then begins behind it.
inline std::string next_name(const char** names) {
  std::string expression(*names, std::strcspn(*names, ","));
  *names += expression.size() + ((*names)[expression.size()] == ',');
  return expression.substr(expression.find_last_of(". ") + 1);
}

} // namespace tsn
