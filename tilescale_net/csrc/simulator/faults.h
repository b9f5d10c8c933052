// Turns a bad access or an endless loop of a simulated thread into an error of its grid.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <time.h>

namespace tsn {
namespace sim {

class Grid;

// Sent to the thread that runs a grid, every second; ends a thread that has run without a pause for too long.
extern const int kStallSignal;

// While it lives, SIGSEGV, SIGBUS, SIGFPE and SIGILL of this thread end the grid's running thread, and not the process.
class FaultGuard {
public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

private:
  timer_t timer_;
  bool has_timer_ = false;
  stack_t previous_stack_;
};

} // namespace sim
} // namespace tsn
