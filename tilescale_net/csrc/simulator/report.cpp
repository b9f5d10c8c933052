// What went wrong in a grid, in words.
#include "faults.h"
#include "grid.h"

#include <algorithm>
#include <stdio.h>

namespace tsn {
namespace sim {

namespace {
std::string text(const Index3& i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}
} // namespace

std::string Grid::block_name(const Block& block) const { return "block " + text(block.threads[0].view.block_idx); }

std::string Grid::line_of(int number) const {
  const bool known = number >= 0 && static_cast<size_t>(number) < launch_.lines.size();
  return known ? launch_.lines[static_cast<size_t>(number)] : "";
}

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
  return std::to_string(blocks) + " of " + std::to_string(blocks_) + " blocks never started, because only " +
         std::to_string(launch_.resident_blocks) +
         " are resident at a time on the simulated GPU (TSN_SIM_SMS sets its size)";
}

std::string Grid::describe_deadlock() const {
  std::string out = "the grid cannot go on (deadlock)";
  int shown = 0;
  for (const auto& block : active_) {
    if (shown++ == 3) {
      out += "; …";
      break;
    }
    unsigned ended = 0, polling = 0, in_warp = 0, at_grid = 0;
    const Fiber* lane = nullptr;
    for (const Fiber& fiber : block->threads) {
      ended += fiber.state == State::done;
      polling += fiber.state == State::yielded;
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
      const std::string plain = id ? "named barrier " + std::to_string(id) : "__syncthreads";
      add(std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) + " threads at " +
          (called ? call_of(*barrier.waiting.front()) : plain));
    }
    if (in_warp) {
      char mask[96];
      snprintf(mask, sizeof(mask), "%u in warp operations (e.g. thread %u with mask 0x%08x", in_warp, lane->view.linear,
               lane->mask);
      add(mask + (lane->announced ? ", at " + call_of(*lane) : std::string()) + ")");
    }
    if (at_grid) add(std::to_string(at_grid) + " at the grid barrier");
    if (polling) add(std::to_string(polling) + " polling");
    if (ended) add(std::to_string(ended) + " ended");
    out += parts;
  }
  if (!never_started().empty()) out += "; " + never_started();
  return out;
}

} // namespace sim
} // namespace tsn
