// How fast a proxy thread takes descriptors and hands them to a transport that completes at once.
#pragma once

#include <cstdint>

namespace tsn::bench {

struct DispatchRate {
  double seconds = 0; // from the first descriptor taken to the last one complete
  uint64_t descriptors = 0;
};

// Fills a ring with `descriptors` (a power of two, in laps of at most 2^20) puts of `bytes` bytes, or with put_signals,
// and times one thread on them. The producer is out of the picture: each lap is written before the clock starts.
DispatchRate measure_dispatch(uint64_t descriptors, uint64_t bytes, bool with_signal, int cpu);

} // namespace tsn::bench
