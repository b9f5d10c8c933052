// T.alloc_barrier: threads arrive, and wait until as many have as the barrier was made for.
#pragma once

#include "tilelang.h"

// What tilelang's generated code calls it. As in PTX an arrival releases, and a wait acquires. Bit 63: parity of the
// running phase; then arrivals of a phase; then those still to come, 20 bits.
class Barrier {
public:
  void init(uint32_t arrivals) { word = uint64_t(arrivals) << 20 | arrivals; }
  void arrive() {
    tsn::sim::word_access(&word, tsn::sim::WordAccess::write, {false, true, kBlockScope});
    --word;
    if ((word & kLeft) == 0) word = (word ^ kParity) | (word >> 20 & kLeft);
    tsn::sim::maybe_yield();
  }
  // Until the phase of this parity has ended; at once where the running phase is the first, and has the other one.
  void wait(uint32_t parity) {
    while ((word >> 63) == (parity & 1)) tsn::sim::api().yield(true);
    tsn::sim::word_access(&word, tsn::sim::WordAccess::read, {true, false, kBlockScope});
  }

private:
  static constexpr uint32_t kBlockScope = uint32_t(tsn::MemScope::cta);
  static constexpr uint64_t kParity = uint64_t(1) << 63, kLeft = (1 << 20) - 1;

  uint64_t word;
};

namespace tl {

template <int threads>
inline bool tl_shuffle_elect() {
  return tsn::sim::self().linear % (threads > 0 ? threads : 0x40000000) == 0;
}
inline void fence_barrier_init() {}

} // namespace tl
