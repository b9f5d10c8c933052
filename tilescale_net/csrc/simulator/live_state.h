// The state of this process's running kernel, for the report of a hang: waiting threads, their words and times; and
// signals sent by its kernels, from which others learn which rank should have sent theirs. Read by any thread.
#pragma once

#include "grid.h"

namespace tsn::sim {

struct LiveWait {
  const Thread* thread;
  uint64_t block;
  unsigned linear;
  int line; // index into LiveState::lines, or -1
  WaitSubject subject;
  uint64_t has;
  uint64_t since_ns;
};

struct SentSignal {
  int pe;
  uint64_t word; // local address
  uint64_t count, value, at_ns;
  std::string line;
};

struct LiveState {
  std::string deadlock; // of all ranks, when a thread gave up
  std::string kernel;   // empty: none runs
  uint64_t began_ns = 0;
  std::vector<std::string> lines;
  std::vector<LiveWait> waits;
};

extern const TraceApi kTraceApi;
extern bool trace_calls; // whether the launch that runs is traced

// Around a launch.
void live_begin(const Launch& launch);
void live_end();
// A primitive is about to run in the running thread.
void live_call(const Call& call);

// The current state; after a thread gave up, the state at that time, until the next launch.
LiveState live_state();
// Number of threads that wait for words, and the last one.
bool waits_for_words(size_t threads, LiveWait* one);
// Signals sent to each word of each PE, the latest last; at most `most`.
std::vector<SentSignal> sent_signals(size_t most);
// A heap is gone: forgets signals to its words.
void forget_sent_signals();

// Events go to the ring in this file from now on. Throws std::runtime_error.
void trace_start(const std::string& path, uint64_t heap_base);
// No more events, once a launch that runs has ended.
void trace_stop();

void trace_kernel_begins(const Launch& launch);
void trace_kernel_ends();
void trace_call_begins(const Call& call);
void trace_call_ends();
void trace_range_begins();
void trace_range_ends();
void trace_wait_ends(const WaitSubject& subject, uint64_t since_ns);

} // namespace tsn::sim
