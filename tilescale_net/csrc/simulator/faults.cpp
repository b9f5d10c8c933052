#include "fiber.h"

#include "grid.h"

#include <sys/syscall.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace tsn::sim {

const int kStallSignal = SIGURG; // ignored by default, so a late one is harmless

namespace {

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int kCount = sizeof(kSignals) / sizeof(kSignals[0]);
struct sigaction previous[kCount], previous_stall;

alignas(16) thread_local char handler_stack[64 * 1024];
thread_local bool guarded = false;
uint64_t switches_at_last_tick = 0;
unsigned quiet_ticks = 0;

void forward(int signal, siginfo_t* info, void* machine) {
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
    forward(signal, info, machine);
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
  // Only the kernel's own code may be abandoned: libraries might hold locks.
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

namespace {
std::string text(const Index3& i) { return concat("(", i.x, ", ", i.y, ", ", i.z, ")"); }
} // namespace

std::string Grid::block_name(const Block& block) const { return "block " + text(block.threads[0].view.block_idx); }

std::string Grid::where(const Fiber& fiber) const {
  return "block " + text(fiber.view.block_idx) + " thread " + text(fiber.view.thread_idx);
}

void Grid::fail(Failure kind, const std::string& what) {
  failure_ = kind;
  message_ = where(*running_) + ": " + what;
  failed_at_ = running_->view.site;
  leave();
  __builtin_unreachable();
}

void Grid::note_fault(int signal, uintptr_t address) {
  fault_signal_ = signal;
  fault_address_ = address;
  failure_ = Failure::kernel;
}

void Grid::describe_fault() {
  // The scheduler's loop has moved on by one thread: the one that it resumed last is the culprit.
  const Fiber& fiber = *ready_[position_ - 1];
  char what[256];
  failure_ = Failure::out_of_bounds;
  failed_at_ = fiber.view.site;
  if (fault_signal_ == SIGFPE) {
    failure_ = Failure::kernel;
    snprintf(what, sizeof(what), "integer division by zero");
  } else if (fault_signal_ == kStallSignal) {
    failure_ = Failure::deadlock;
    snprintf(what, sizeof(what),
             "the thread ran for %.0f s without reaching a barrier, a wait or its end; if it reads memory in a loop "
             "without N.ld or a wait, it never sees what others write",
             launch_.stall_seconds);
  } else if (stacks_.is_guard(fault_address_)) {
    failure_ = Failure::kernel;
    snprintf(what, sizeof(what),
             "the thread needs more than its stack of %zu bytes; use smaller local arrays or set TSN_SIM_STACK higher",
             stacks_.bytes());
  } else if (fault_signal_ == SIGILL || fault_signal_ == SIGTRAP) {
    failure_ = Failure::kernel;
    snprintf(what, sizeof(what), "reached code that must not be reached");
  } else {
    snprintf(what, sizeof(what), "access to address 0x%zx, which is not mapped", static_cast<size_t>(fault_address_));
  }
  message_ = where(fiber) + ": " + what;
}

std::string Grid::never_started() const {
  const uint64_t blocks = std::max(starved_, blocks_ - started_);
  if (!blocks) return "";
  return concat(blocks, " of ", blocks_, " blocks never started, because only ", launch_.resident_blocks,
                " are resident at a time on the simulated GPU (TSN_SIM_SMS sets its size)");
}

std::string Grid::describe_deadlock() const {
  std::string out = "the grid cannot go on (deadlock)";
  int shown = 0;
  bool at_mbarrier = false;
  for (const auto& block : active_) {
    if (shown++ == 3) {
      out += "; …";
      break;
    }
    unsigned ended = 0, in_warp = 0, at_grid = 0;
    const Fiber* lane = nullptr;
    std::map<std::string, unsigned> polling;
    for (const Fiber& fiber : block->threads) {
      ended += fiber.state == State::done;
      if (fiber.state == State::yielded) {
        ++polling[(fiber.view.at_mbarrier ? "at T.barrier_wait" : "polling") +
                  in_brackets(launch_.lines, fiber.view.site)];
        at_mbarrier = at_mbarrier || fiber.view.at_mbarrier;
      }
      at_grid += fiber.state == State::grid_barrier;
      if (fiber.state == State::warp) ++in_warp, lane = &fiber;
    }
    out += "; " + block_name(*block) + ": ";
    std::string parts;
    const auto add = [&](const std::string& part) { parts += (parts.empty() ? "" : ", ") + part; };
    for (int id = 0; id < 16; ++id) {
      const Barrier& barrier = block->barriers[id];
      if (!barrier.arrived) continue;
      const bool called = id == 0 && !barrier.waiting.empty() && barrier.waiting.front()->announced;
      const std::string plain = id ? concat("named barrier ", id) : "__syncthreads";
      add(concat(barrier.arrived, " of ", barrier.expected, " threads at ",
                 called ? call_of(*barrier.waiting.front()) : plain));
    }
    if (in_warp) {
      char mask[96];
      snprintf(mask, sizeof(mask), "%u in warp operations (e.g. thread %u with mask 0x%08x", in_warp, lane->view.linear,
               lane->mask);
      add(mask + (lane->announced ? ", at " + call_of(*lane) : std::string()) + ")");
    }
    if (at_grid) add(concat(at_grid, " at the grid barrier"));
    for (const auto& [where, threads] : polling) add(concat(threads, " ", where));
    if (ended) add(concat(ended, " ended"));
    out += parts;
  }
  if (!never_started().empty()) out += "; " + never_started();
  if (at_mbarrier)
    out += "; a T.barrier_arrive is missing, or a wait has the wrong parity: T.barrier_wait(b, k % 2) waits for phase "
           "k of b, counted from 0";
  return out;
}

} // namespace tsn::sim
