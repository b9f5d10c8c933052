// How kernels report to the simulator where they wait and what they call, for hang reports and traces.
#pragma once

#include <stdint.h>

namespace tsn {
namespace sim {

// What a thread waits for.
struct WaitSubject {
  uint32_t operation;   // Operation of context.h
  int pe;               // the PE that it waits for; -1: not known
  const uint64_t* word; // a signal word of the heap, or null
  int64_t wanted;
  uint32_t comparison; // 1 + Compare, or 0
};

struct TraceApi {
  // The running thread has looked once and has to wait.
  void (*wait_begins)(const WaitSubject&);
  void (*wait_ends)();
  // The running thread gives up: from here on all waits of this PE end.
  void (*gives_up)();
  // Whether calls are traced now; `call_ends` is called only then: the running thread's call has ended.
  const bool* traces;
  void (*call_ends)();
  // A range of the running thread, named in the table of lines.
  void (*range_begins)();
  void (*range_ends)();
};

} // namespace sim
} // namespace tsn
