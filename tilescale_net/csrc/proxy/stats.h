// Counters of one proxy thread: written by it alone, read by anyone at any time.
#pragma once

#include "tilescale_net/csrc/common/clock.h"

namespace tsn::proxy {

class Counter {
public:
  void add(uint64_t n = 1) { __atomic_store_n(&value_, value_ + n, __ATOMIC_RELAXED); }
  void raise(uint64_t n) {
    if (n > value_) __atomic_store_n(&value_, n, __ATOMIC_RELAXED);
  }
  uint64_t get() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }

private:
  uint64_t value_ = 0;
};

// Times of one stage: count, sum, maximum, and a histogram by powers of two of ticks.
struct StageStats {
  Counter count, sum, max;
  Counter bucket[48];
  void add(uint64_t t) {
    count.add();
    sum.add(t);
    max.raise(t);
    bucket[t ? 63 - __builtin_clzll(t | 1) < 47 ? 63 - __builtin_clzll(t | 1) : 47 : 0].add();
  }
};

struct ProxyStats {
  Counter puts, put_signals, put_values, signals, gets, fences, flushes; // descriptors taken, by kind
  Counter bytes_put, bytes_got;
  Counter chunks, messages, records; // posted writes and reads; messages and the records in them
  Counter inlined;                   // puts whose data travelled in a message
  Counter delegated;                 // chunks delegated to another thread
  Counter unrung;                    // chunks that were posted with the doorbell of the next one
  Counter retries;                   // posts that the transport answered with `again`
  Counter held;                      // times that a queue had to wait for room behind it
  Counter rejected_at_fabric;        // messages from unknown senders, as the transport counts them
  Counter nameless_failures;         // whose PE is unknown: the network's own packets, or after an exclusion
  Counter rejected_messages;         // messages and immediates of PEs that this proxy does not serve: dropped
  Counter chunks_in, records_in, signals_applied, acks_sent;
  Counter queue_depth_max; // most descriptors found in one visit to a queue
  Counter in_flight_max;
  StageStats pop;        // one visit to a non-empty queue: decoding, checking, accepting
  StageStats post;       // one round of posting that posted something
  StageStats completion; // post of a chunk until its completion
  StageStats flush;      // pop of a flush until its ticket is written
};

} // namespace tsn::proxy
