// What the proof covers: the race detector, and the exploration of every schedule.
//
// What names a gap where it is met takes its words from this table, and docs/simulator.md's section is made of it.
#pragma once

#include <string>
#include <vector>

namespace tsn::sim {

// Gaps that are named where a run meets them: by a warning of the race detector, and in the verdict of a check.
enum class Gap {
  none,
  pointers,
  warps,
  pages,
  puts,
  exact_waits,
  polls,
  reordered,
  late_stores,
  shared,
  sources,
  decisions
};

constexpr unsigned long kMaxLocalPages = 1 << 14; // of 4 KiB
constexpr unsigned long kMaxPuts = 4096, kMaxExactWaits = 4096, kMaxDecisions = 100000;

struct Rule {
  bool of_schedules; // of the exploration of every schedule; else of the race detector
  const char *what, *followed, *not_followed;
  const char* where; // in the code
  Gap gap = Gap::none;
};

const std::vector<Rule>& rules();
// What is not followed, with the place where a run has met it.
std::string gap_text(Gap gap, const std::string& line = "");

} // namespace tsn::sim
