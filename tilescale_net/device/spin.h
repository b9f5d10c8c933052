// Bounded waiting: every spin of the package goes through here.
#pragma once

#include "error.h"

namespace tsn {

enum class Deadline { pending, aborted, expired };
struct DeadlineCheck {
  Deadline state;
  uint64_t start;
};

// Reads the abort words and the clock. The deadline counts from the first call, which gets a `start` of 0.
TSN_COLD DeadlineCheck check_deadline(const Context* ctx, uint64_t start) {
  const uint32_t* word = reinterpret_cast<const uint32_t*>(platform::load_constant(&ctx->abort_word));
  if (aborted(ctx) || platform::load<Order::relaxed, MemScope::sys>(word) != 0) {
    set_aborted(ctx);
    return {Deadline::aborted, start};
  }
  const uint64_t now = platform::timer_ns();
  if (start == 0) start = now;
  return {now - start > platform::load_constant(&ctx->timeout_ns) ? Deadline::expired : Deadline::pending, start};
}

// The subject of a spin in reports; see wait_begins in platform.h.
struct SpinSubject {
  Operation operation;
  int pe = -1;
  const uint64_t* word = nullptr;
  uint64_t wanted = 0;
  uint32_t comparison = 0;
};

namespace detail {

template <class Ready, class Expire>
TSN_DEVICE bool spin_on(const Context* ctx, Ready ready, Expire expire) {
  uint64_t start = 0;
  for (uint32_t polls = 1;; polls++) {
    platform::relax();
    if (ready()) return true;
    if (polls % platform::kPollsPerCheck) continue;
    const DeadlineCheck check = check_deadline(ctx, start);
    start = check.start;
    if (check.state == Deadline::pending) continue;
    if (check.state == Deadline::expired) expire();
    return false;
  }
}

} // namespace detail

// Polls `ready()` until it is true. False when the job was aborted or the deadline passed; `expire()` then reports the
// latter. A poll costs nothing beyond `ready`: abort and clock are read once in kPollsPerCheck polls. `subject()` is
// called by platforms that report waits alone.
template <class Subject, class Ready, class Expire>
TSN_DEVICE bool spin(const Context* ctx, Subject subject, Ready ready, Expire expire) {
  if constexpr (platform::kDefersRemoteWrites) {
    if (!platform::waits_without_a_look() && ready()) return true;
    const SpinSubject s = subject();
    platform::wait_begins(s.operation, s.pe, s.word, s.wanted, s.comparison);
    const bool seen = detail::spin_on(ctx, ready, expire);
    platform::wait_ends();
    return seen;
  } else {
    if (ready()) return true;
    return detail::spin_on(ctx, ready, expire);
  }
}

// The same, without a report.
template <class Ready, class Expire>
TSN_DEVICE bool spin(const Context* ctx, Ready ready, Expire expire) {
  return ready() || detail::spin_on(ctx, ready, expire);
}

} // namespace tsn
