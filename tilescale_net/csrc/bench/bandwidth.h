// One-way and two-way bandwidth of sends, writes and reads, with perftest's knobs and definitions.
#pragma once

#include "session.h"

namespace tsn::bench {

enum class Transfer : uint8_t { send, write, read };

struct BandwidthOptions {
  Transfer operation = Transfer::write;
  uint64_t bytes = 65536;      // of one message
  uint64_t iterations = 1000;  // messages
  double duration_s = 0;       // above 0: this long, for any number of messages
  uint32_t tx_depth = 128;     // messages outstanding
  uint32_t rx_depth = 512;     // receives posted
  uint32_t post_list = 1;      // messages posted behind one doorbell; divides iterations
  uint32_t recv_post_list = 1; // receives posted at a time
  bool initiator = true;       // sends, writes or reads; otherwise it serves
  bool stamps = true;          // note the time of every post and completion, for the peak
};

struct BandwidthResult {
  uint64_t iterations = 0;
  double seconds = 0;             // first post to last completion
  double least_s_per_message = 0; // over any window of messages; NaN without stamps
};

// Both processes of a pair call it with equal options but `initiator`; both may be initiators. Message i goes over rail
// i % rails. The session's buffer holds what goes out in its first half and what comes in in its second. Returns zeros
// at a process that is no initiator.
BandwidthResult run_bandwidth(Session& session, int peer, const BandwidthOptions& options);

// A pattern in which no two words are alike, and whether memory holds it.
void fill_pattern(char* data, uint64_t bytes, uint64_t seed);
bool holds_pattern(const char* data, uint64_t bytes, uint64_t seed);

} // namespace tsn::bench
