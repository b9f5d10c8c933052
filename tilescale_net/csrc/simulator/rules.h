// Coverage of the proof: the race detector, and the exploration of every schedule.
//
// Reports of gaps take their words from this table, and docs/simulator.md's section is made from it.
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn::sim {

// Gaps that a run reports when it meets them: in a warning of the race detector, and in the verdict of a check.
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
// Text of a gap, with the place where a run has met it.
std::string gap_text(Gap gap, const std::string& line = "");

} // namespace tsn::sim
