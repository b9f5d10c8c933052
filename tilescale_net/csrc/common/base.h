// Standard headers, and texts of several parts, for all files.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

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
