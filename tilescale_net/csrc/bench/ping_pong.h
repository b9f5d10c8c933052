// Two-sided ping-pong: messages of any size there and back, in chunks, several of them in flight.
#pragma once

#include <algorithm>
#include <vector>

#include "session.h"

namespace tsn::bench {

struct PingPongOptions {
  uint64_t bytes = 8;       // of one message
  uint64_t chunk = 1 << 20; // largest transfer; lowered to what the provider takes
  uint64_t iterations = 10; // timed round trips
  uint64_t warmup = 2;      // untimed ones before
  uint32_t window = 64;     // chunks in flight each way
  bool starter = true;      // sends first; exactly one of the pair does
  bool verify = true;       // the starter checks that what comes back is what it sent
  // GPU memory of the session's size that messages start from and arrive in; 0: host memory. Where the session has
  // registered it, it is used directly, otherwise the session's host memory is the staging buffer.
  uint64_t device_address = 0;
  int device = 0;
};

// Bytes that a session needs for messages of up to `bytes`: outgoing, and two for incoming, because the echo of one
// message goes out from where it came in while the next one may arrive. Whole chunks, because chunks may arrive in any
// order.
inline uint64_t ping_pong_part(uint64_t bytes, uint64_t chunk) {
  const uint64_t whole = bytes <= chunk ? bytes : (bytes + chunk - 1) / chunk * chunk;
  return (whole + 4095) / 4096 * 4096;
}
inline uint64_t ping_pong_bytes(uint64_t bytes, uint64_t chunk) { return 3 * ping_pong_part(bytes, chunk); }

// Seconds of each timed round trip at the starter, nothing at the other. Uses rail 0 alone. The transport must leave
// receives to its caller (message_buffers = 0). Throws FabricError, also when data came back wrong.
std::vector<double> run_ping_pong(Session& session, int peer, const PingPongOptions& options);

} // namespace tsn::bench
