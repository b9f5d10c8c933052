// The events of simulated kernels for TSN_TRACE. All but start and stop run in the thread that runs the grid.
#pragma once

#include "grid.h"

#include <string>

namespace tsn {
namespace sim {

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

} // namespace sim
} // namespace tsn
