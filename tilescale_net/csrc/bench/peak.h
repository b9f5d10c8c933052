// Bandwidth from time stamps, as perftest defines it, without libfabric: the formulas that tests check by hand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tsn::bench {

// The least time per message over all windows of consecutive messages: min over i <= j of
// (completed[j] - posted[i]) / (j - i + 1), in the stamps' unit. perftest compares all pairs; this finds the same
// minimum in a few linear passes (Dinkelbach's method: for a candidate ratio, find the window that beats it most).
// NaN when there are no stamps.
inline double least_time_per_message(const std::vector<uint64_t>& posted, const std::vector<uint64_t>& completed) {
  const size_t n = std::min(posted.size(), completed.size());
  if (!n) return std::numeric_limits<double>::quiet_NaN();
  const uint64_t zero = posted[0];
  double best = static_cast<double>(completed[0] - zero);
  for (;;) {
    // A window (i, j) beats `best` where (completed[j] - best * (j + 1)) - (posted[i] - best * i) < 0.
    double highest = -std::numeric_limits<double>::infinity(), lowest = 0;
    size_t start = 0, from = 0, to = n;
    for (size_t j = 0; j < n; ++j) {
      const double open = static_cast<double>(posted[j] - zero) - best * static_cast<double>(j);
      if (open > highest) {
        highest = open;
        start = j;
      }
      const double gain = static_cast<double>(completed[j] - zero) - best * static_cast<double>(j + 1) - highest;
      if (gain < lowest) {
        lowest = gain;
        from = start;
        to = j;
      }
    }
    if (to == n) return best;
    const double ratio = static_cast<double>(completed[to] - posted[from]) / static_cast<double>(to - from + 1);
    if (!(ratio < best)) return best; // no further progress within rounding
    best = ratio;
  }
}

} // namespace tsn::bench
