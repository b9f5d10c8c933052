// A small seeded generator (xorshift64*, Vigna 2016), equal on every machine.
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn::sim {

class Random {
public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {
    if (!state_) state_ = 1;
    for (int i = 0; i < 4; ++i) (*this)();
  }
  uint64_t operator()() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  // A number in [0, n).
  uint64_t below(uint64_t n) { return static_cast<uint64_t>(static_cast<unsigned __int128>((*this)()) * n >> 64); }

private:
  uint64_t state_;
};

} // namespace tsn::sim
