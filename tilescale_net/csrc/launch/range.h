// The numbers that an integer parameter of a kernel holds; TVM's host functions cut off the bits of others.
#pragma once

#include <cstdint>
#include <limits>

namespace tsn::launch {

struct Range {
  int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();

  bool holds(int64_t value) const { return low <= value && value <= high; }
};

} // namespace tsn::launch
