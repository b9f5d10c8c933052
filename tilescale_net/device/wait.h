// Waiting for signals.
#pragma once

#include "drain_add_mailbox.h"
#include "scope.h"
#include "spin.h"

namespace tsn {

// Words are compared as signed integers, so counting from 0 in signed arithmetic, such as waiting for `i - slots`, is
// right in the first rounds too.
template <Compare C>
TSN_DEVICE bool holds(uint64_t word, int64_t value) {
  const int64_t seen = int64_t(word);
  if constexpr (C == Compare::eq) return seen == value;
  if constexpr (C == Compare::ne) return seen != value;
  if constexpr (C == Compare::ge) return seen >= value;
  if constexpr (C == Compare::gt) return seen > value;
  if constexpr (C == Compare::le) return seen <= value;
  if constexpr (C == Compare::lt) return seen < value;
}

namespace detail {

// Whether adds still in a mailbox, which only increase a word, can make the comparison false.
template <Compare C>
constexpr bool kMindsAdds = C != Compare::ge && C != Compare::gt;

// One thread's wait. `pe` is the PE that should send the signal, -1 if unknown. `Looks`: the caller uses the value.
template <Compare C, bool Looks = false>
TSN_DEVICE uint64_t wait_one(const Context* ctx, const uint64_t* sig, int64_t value, Operation operation, int pe) {
  constexpr bool kAll = Looks || kMindsAdds<C>;
  // Read once, after the first poll: a wait should spend its time on polling.
  int mailboxes = kAll ? int(n_add_mailboxes(ctx)) : -1;
  uint64_t seen;
  spin(
      ctx, [&] { return SpinSubject{operation, pe, sig, uint64_t(value), 1 + uint32_t(C)}; },
      [&] {
        seen = platform::load<Order::acquire, MemScope::sys>(sig);
        if (holds<C>(seen, value)) {
          if (!kAll || TSN_LIKELY(mailboxes == 0)) return true;
          settle_add_mailboxes(ctx, uint32_t(mailboxes));
          seen = platform::load<Order::acquire, MemScope::sys>(sig);
          return holds<C>(seen, value);
        }
        if (mailboxes < 0) mailboxes = int(n_add_mailboxes(ctx));
        if (mailboxes != 0) drain_add_mailboxes(ctx, uint32_t(mailboxes));
        return false;
      },
      [&] { fail(ctx, kWaitTimeout, operation, pe, sig, uint64_t(value), seen, 0, 1 + uint32_t(C)); });
  if constexpr (platform::kDefersRemoteWrites) platform::waited(sig);
  return seen;
}

} // namespace detail

// Waits until the signal word compares with `value` as in C (signed); returns the word as then seen. Writes ordered
// before the signal are visible to the scope afterwards. Ends early, with the current word, if the job is aborted or
// the deadline passes. `Looks`: the value is used.
template <Scope S, Compare C, bool Looks = true>
TSN_DEVICE uint64_t wait(const Context* ctx, const uint64_t* sig, int64_t value) {
  enter<S>(kOpWait, nullptr, int64_t(C), kNoPe, sig, uint64_t(value));
  return scope_broadcast<S>([&] { return detail::wait_one<C, Looks>(ctx, sig, value, kOpWait, -1); });
}

// As wait; also orders later TMA and bulk copies of the scope. They belong to the async proxy, which an acquire alone
// does not order.
template <Scope S, Compare C, bool Looks = true>
TSN_DEVICE uint64_t wait_async(const Context* ctx, const uint64_t* sig, int64_t value) {
  enter<S>(kOpWait, nullptr, int64_t(C), kNoPe, sig, uint64_t(value));
  return scope_broadcast<S>([&] {
    const uint64_t seen = detail::wait_one<C, Looks>(ctx, sig, value, kOpWait, -1);
    platform::bulk_publish();
    return seen;
  });
}

// Reads the word once; true orders like wait. True also once the job is aborted, so that a loop around it ends; such a
// loop has no deadline of its own.
template <Compare C>
TSN_DEVICE bool test(const Context* ctx, const uint64_t* sig, int64_t value) {
  enter<Scope::thread>(kOpTest, nullptr, int64_t(C), kNoPe, sig, uint64_t(value));
  bool seen = holds<C>(platform::load<Order::acquire, MemScope::sys>(sig), value);
  if (!seen || detail::kMindsAdds<C>)
    if (const uint32_t mailboxes = n_add_mailboxes(ctx)) {
      settle_add_mailboxes(ctx, mailboxes);
      seen = holds<C>(platform::load<Order::acquire, MemScope::sys>(sig), value);
    }
  if (seen) {
    if constexpr (platform::kDefersRemoteWrites) platform::waited(sig);
    return true;
  }
  platform::relax();
  // Reading the host's abort word takes longer than the test itself: one call in many does.
  const bool sample = platform::ticks() / 32 % 256 == 0;
  return sample ? check_deadline(ctx, 0).state == Deadline::aborted : aborted(ctx);
}

} // namespace tsn
