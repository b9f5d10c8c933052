#include "faults.h"

#include "grid.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace tsn {
namespace sim {

const int kStallSignal = SIGURG; // ignored by default, so that a late one does no harm

namespace {

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int kCount = sizeof(kSignals) / sizeof(kSignals[0]);
struct sigaction previous[kCount], previous_stall;

alignas(16) thread_local char handler_stack[64 * 1024];
thread_local bool guarded = false;
uint64_t switches_at_last_tick = 0;
unsigned quiet_ticks = 0;

void pass_on(int signal, siginfo_t* info, void* machine) {
  for (int i = 0; i < kCount; ++i) {
    if (kSignals[i] != signal) continue;
    const struct sigaction& old = previous[i];
    if (old.sa_flags & SA_SIGINFO) {
      old.sa_sigaction(signal, info, machine);
    } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
      old.sa_handler(signal);
    } else {
      sigaction(signal, &old, nullptr); // the access is repeated and ends the process as it would have
    }
  }
}

void on_fault(int signal, siginfo_t* info, void* machine) {
  Grid* grid = guarded ? current_grid : nullptr;
  if (!grid || !grid->running() || !redirect(machine, grid->scheduler_context())) {
    pass_on(signal, info, machine);
    return;
  }
  grid->note_fault(signal, reinterpret_cast<uintptr_t>(info->si_addr));
}

void on_tick(int, siginfo_t*, void* machine) {
  Grid* grid = guarded ? current_grid : nullptr;
  if (!grid || !grid->running()) return;
  if (grid->switches() != switches_at_last_tick) {
    switches_at_last_tick = grid->switches();
    quiet_ticks = 0;
    return;
  }
  if (++quiet_ticks < grid->launch().stall_seconds) return;
  // Only the kernel's own code may be left behind: libraries might hold locks.
  const uintptr_t at = program_counter(machine);
  if (at < grid->launch().text_begin || at >= grid->launch().text_end) return;
  if (redirect(machine, grid->scheduler_context())) grid->note_fault(kStallSignal, 0);
}

} // namespace

FaultGuard::FaultGuard() {
  guarded = true;
  switches_at_last_tick = quiet_ticks = 0;
  stack_t stack;
  memset(&stack, 0, sizeof(stack));
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof(handler_stack);
  sigaltstack(&stack, &previous_stack_);

  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
  action.sa_sigaction = on_tick;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigaction(kStallSignal, &action, &previous_stall);

  sigevent event;
  memset(&event, 0, sizeof(event));
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kStallSignal;
  event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
  has_timer_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
  if (has_timer_) {
    const itimerspec every_second{{1, 0}, {1, 0}};
    timer_settime(timer_, 0, &every_second, nullptr);
  }
}

FaultGuard::~FaultGuard() {
  if (has_timer_) timer_delete(timer_);
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  sigaction(kStallSignal, &previous_stall, nullptr);
  sigaltstack(&previous_stack_, nullptr);
  guarded = false;
}

} // namespace sim
} // namespace tsn
