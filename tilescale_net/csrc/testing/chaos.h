// A transport that behaves as badly as a network may, by a seed; wraps any other transport.
//
// What it does, each as a field of the text "seed=7,reorder=0.3,split=0.2,delay_us=200,eagain=0.1,imm_bits=16":
// - seed       the random numbers; every process adds its own index, so equal texts still differ between processes
// - reorder    probability that an operation or an arrival is held back, so that later ones overtake it
// - delay_us   the longest that anything is held back, in microseconds (100 unless given)
// - split      probability that a write travels in several pieces, which arrive in any order
// - eagain     probability that a post answers `again`; 1 = always
// - depth      outstanding operations per rail (0 = as the transport)
// - imm_bits   width of immediates
// - max_write  largest transfer in bytes, for providers with small limits (0 = as the transport)
// - error      probability that an operation fails
// - error_after  the operation with this number, and all after it, fail (0 = none)
// - error_code   the code with which operations fail (5 = EIO)
// - stall_after  from the operation with this number on nothing moves any more, as with a dead peer (0 = never)
// "on" means "seed=1,reorder=0.3,split=0.2,eagain=0.1".
//
// A source is read when its operation is released, not when it is posted, which exposes callers that reuse it before
// `done`.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::testing {

using namespace fabric;

struct ChaosOptions {
  uint64_t seed = 1;
  double reorder = 0, split = 0, eagain = 0, error = 0;
  uint64_t delay_us = 100, depth = 0, max_write = 0, error_after = 0, stall_after = 0, error_code = EIO;
  int imm_bits = 32;
};

// Throws FabricError naming the field that is unknown or out of range.
ChaosOptions parse_chaos(const std::string& text);

std::unique_ptr<Transport> make_chaos(std::unique_ptr<Transport> inner, const ChaosOptions& options, int self);

} // namespace tsn::testing
