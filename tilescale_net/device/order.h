// Ordering and completion of puts.
#pragma once

#include "address.h"
#include "proxy_ops.h"

namespace tsn {

namespace detail {

// Paths to the PE, or, with -1, to all; neither for an invalid PE, which is reported.
struct Paths {
  bool direct, proxy;

  TSN_DEVICE Paths(const Context* ctx, Operation operation, int pe) {
    const PeerAccess access(ctx, pe);
    const bool all = pe == -1, found = !all && access.exists();
    direct = all || (found && access.direct());
    proxy = all ? platform::load_constant(&ctx->n_queues) != 0 : found && !access.direct();
    if (!all && !found) fail(ctx, kPeOutOfRange, operation, pe, nullptr, 0, 0, 0);
    if (access.aborted) proxy = false;
  }
};

// A system-scope fence waits until the stores before it have been performed at their target.
TSN_DEVICE void complete_direct(const Context* ctx, int pe) {
  bool taken = false;
  if constexpr (platform::kDefersRemoteWrites) taken = platform::defer_quiet(ctx, pe);
  if (!taken) platform::fence<MemScope::sys>();
}

} // namespace detail

// Orders the puts that happened before it ahead of the signals to the same PE that happen after it. On the proxy path
// it does not wait. Called by one thread; pe = -1 means all PEs.
TSN_DEVICE void fence(const Context* ctx, int pe) {
  enter<Scope::thread>(kOpFence, nullptr, 0, pe);
  const detail::Paths paths(ctx, kOpFence, pe);
  if (paths.direct) {
    bool taken = false;
    if constexpr (platform::kDefersRemoteWrites) taken = platform::defer_fence(ctx, pe);
    if (!taken) platform::fence<MemScope::sys>();
  }
  if (paths.proxy) queue_fence(ctx, pe);
}

// Tickets of flushes without a queue: kDirectTickets plus 1 + pe. Queues never reach these numbers.
constexpr uint64_t kDirectTickets = ~uint64_t(0) << 32;

// Begins to complete the puts to the PE, or with -1 to all, that happened before it; flush_wait ends that. By one
// thread.
TSN_DEVICE uint64_t flush_async(const Context* ctx, int pe) {
  enter<Scope::thread>(kOpFlush, nullptr, 0, pe);
  const detail::Paths paths(ctx, kOpFlush, pe);
  uint64_t ticket = kDirectTickets + (uint32_t(pe) + 1);
  if (paths.proxy) {
    if (paths.direct) detail::complete_direct(ctx, pe);
    ticket = queue_flush(ctx, pe);
  }
  if constexpr (platform::kDefersRemoteWrites) platform::flushed(ticket, false);
  return ticket;
}

// Returns when the puts of the flush are complete at their target and their sources can be written again.
TSN_DEVICE void flush_wait(const Context* ctx, uint64_t ticket) {
  if (ticket < kDirectTickets) queue_wait(ctx, ticket, kOpFlush);
  else detail::complete_direct(ctx, int(uint32_t(ticket) - 1));
  if constexpr (platform::kDefersRemoteWrites) platform::flushed(ticket, true);
}

// Both at once. Called by one thread; pe = -1 means all PEs.
TSN_DEVICE void quiet(const Context* ctx, int pe) {
  enter<Scope::thread>(kOpQuiet, nullptr, 0, pe);
  const detail::Paths paths(ctx, kOpQuiet, pe);
  const uint64_t ticket = paths.proxy ? queue_flush(ctx, pe) : 0;
  if (paths.direct) detail::complete_direct(ctx, pe);
  if (paths.proxy) queue_wait(ctx, ticket, kOpQuiet);
}

// fence() and quiet() by all threads of the scope: the leader makes the call, after everything before it in any of
// them, and none continues before it has returned.
template <Scope S>
TSN_DEVICE void fence(const Context* ctx, int pe) {
  scope_sync<S>();
  if (scope_leader<S>()) fence(ctx, pe);
  scope_sync<S>();
}
template <Scope S>
TSN_DEVICE void quiet(const Context* ctx, int pe) {
  scope_sync<S>();
  if (scope_leader<S>()) quiet(ctx, pe);
  scope_sync<S>();
}

} // namespace tsn
