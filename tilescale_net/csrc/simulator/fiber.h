// Fibers: separate stacks, switched without the operating system.
#pragma once

#include "tilescale_net/csrc/common/base.h"

#include <signal.h>
#include <time.h>

namespace tsn::sim {

// Stacks of one size below guard pages, reused as soon as they are free: a grid whose threads never wait needs a
// single one. The last released one is taken first, so it is still in the cache.
class StackPool {
public:
  explicit StackPool(size_t bytes);
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  char* take(); // lowest usable address; throws std::bad_alloc when the system has no memory left
  void give(char* stack);
  size_t bytes() const { return bytes_; }
  // Whether an address lies in a guard page, i.e. a thread used more stack than it has.
  bool is_guard(uintptr_t address) const;

private:
  void grow();

  size_t bytes_, slot_bytes_; // a slot is a guard page and a stack
  std::vector<char*> free_;
  std::vector<char*> chunks_;
};

// Saves the running context in *from and continues the one in `to`.
extern "C" void tsn_sim_switch(void** from, void* to);

// A context that calls `entry` (which never returns) on the given stack when it is first switched to.
void* make_context(char* stack, size_t bytes, void (*entry)());

// Changes the machine context of a signal handler, so that it returns into the saved context `to`.
// False if this machine's registers are not known.
bool redirect(void* machine_context, void* to);

// The instruction that a signal handler's machine context was interrupted at, or 0.
uintptr_t program_counter(void* machine_context);

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

} // namespace tsn::sim
