// Symmetric addresses: translation of a local address to another PE, and checks of the access.
#pragma once

#include "error.h"
#include "scope.h"

namespace tsn {

TSN_DEVICE int my_pe(const Context* ctx) { return platform::load_constant(&ctx->my_pe); }
TSN_DEVICE int n_pes(const Context* ctx) { return platform::load_constant(&ctx->n_pes); }
TSN_DEVICE int node_pe(const Context* ctx) { return platform::load_constant(&ctx->node_pe); }
TSN_DEVICE int n_node_pes(const Context* ctx) { return platform::load_constant(&ctx->n_node_pes); }
TSN_DEVICE bool is_pe(const Context* ctx, int pe) { return uint32_t(pe) < uint32_t(n_pes(ctx)); }

namespace detail {

TSN_COLD uint64_t base_beyond_inline(const Context* ctx, int pe) {
  return is_pe(ctx, pe) ? platform::load_constant(&ctx->peer_base[pe]) : 0;
}

} // namespace detail

// The PE's heap as mapped here; 0 if unmapped, and for a number that is no PE: the inline bases exist for all
// PEs below kInlineBases, so one load answers.
TSN_DEVICE uint64_t peer_base(const Context* ctx, int pe) {
  const bool inlined = uint32_t(pe) < kInlineBases;
  const uint64_t base = platform::load_constant(&ctx->peer_base[inlined ? pe : 0]);
  return TSN_LIKELY(inlined) ? base : detail::base_beyond_inline(ctx, pe);
}

TSN_DEVICE bool is_direct(const Context* ctx, int pe) { return peer_base(ctx, pe) != 0; }

// Access to one PE. All context fields of a call are loaded at once, before the first use: after a wait, a chain of
// loads would cost one latency per link. The base is loaded last and used first, because the assembler would put
// arithmetic on the others ahead of its load.
struct PeerAccess {
  const Context* ctx;
  int pe;
  uint64_t heap_base, heap_bytes;
  bool aborted; // the job was aborted. Threads may see that at different times: skip accesses, never barriers
  uint64_t base;

  TSN_DEVICE PeerAccess(const Context* c, int p) : ctx(c), pe(p) {
    heap_base = platform::load_constant(&ctx->heap_base);
    heap_bytes = platform::load_constant(&ctx->heap_bytes);
    const uint64_t stop = platform::load_recent(&ctx->aborted);
    base = peer_base(ctx, pe);
    aborted = stop != 0;
  }

  // Whether the PE is mapped; if not, it is reached through the proxy or does not exist.
  TSN_DEVICE bool direct() const { return TSN_LIKELY(base != 0); }
  TSN_DEVICE bool exists() const { return direct() || is_pe(ctx, pe); }

  // The only translation: the same offset in the PE's heap.
  template <class T>
  TSN_DEVICE T* translate(T* local) const {
    return reinterpret_cast<T*>(base + (reinterpret_cast<uint64_t>(local) - heap_base));
  }

  // Whether [local, local + bytes) lies in the part of the heap that belongs to the user.
  TSN_DEVICE bool symmetric(const void* local, int64_t bytes) const {
    const uint64_t offset = reinterpret_cast<uint64_t>(local) - heap_base - kSystemBytes;
    const uint64_t extent = heap_bytes - kSystemBytes;
    return (offset <= extent) & (uint64_t(bytes) <= extent - offset);
  }

  // Whether an operation on these bytes, and on the signal that comes with them, may proceed. The leader reports a
  // rejected one and aborts the job; it never becomes an access. The answer is the same in all threads of the scope.
  template <Scope S>
  TSN_DEVICE bool validate(Operation operation, const void* local, int64_t bytes) const {
    return allow_or_report<S>(operation, symmetric(local, bytes), local, bytes);
  }
  template <Scope S>
  TSN_DEVICE bool validate(Operation operation, const void* local, int64_t bytes, const uint64_t* sig) const {
    const bool inside = symmetric(local, bytes), signal_inside = symmetric(sig, sizeof(*sig));
    const bool wrong_signal = inside && !signal_inside;
    if constexpr (platform::kDefersRemoteWrites)
      if (signal_inside && scope_leader<S>()) platform::inspect(operation, sig, sizeof(*sig));
    return allow_or_report<S>(operation, inside && signal_inside, wrong_signal ? sig : local, wrong_signal ? 8 : bytes);
  }

  // All of it in one: whether the PE is mapped, the operation may proceed, and the job is alive. So a message waits
  // for one branch. If the answer is no, the leader asks again and reports the error. (If remote writes are deferred,
  // this ignores an aborted job: the platform's barriers must be met.)
  template <Scope S>
  TSN_DEVICE bool may_proceed(Operation operation, const void* local, int64_t bytes) const {
    if constexpr (platform::kDefersRemoteWrites) return validate<S>(operation, local, bytes) && direct();
    const bool inside = symmetric(local, bytes);
    return (base != 0) & !aborted & inside;
  }
  template <Scope S>
  TSN_DEVICE bool may_proceed(Operation operation, const void* local, int64_t bytes, const uint64_t* sig) const {
    if constexpr (platform::kDefersRemoteWrites) return validate<S>(operation, local, bytes, sig) && direct();
    const bool inside = symmetric(local, bytes), signal_inside = symmetric(sig, sizeof(*sig));
    return (base != 0) & !aborted & inside & signal_inside;
  }

private:
  template <Scope S>
  TSN_DEVICE bool allow_or_report(Operation operation, bool inside, const void* local, int64_t bytes) const {
    const bool found = exists();
    if (TSN_LIKELY(found && inside)) {
      if constexpr (platform::kDefersRemoteWrites) // the simulator also checks allocations there
        if (scope_leader<S>()) platform::inspect(operation, local, bytes);
      return true;
    }
    if (scope_leader<S>())
      fail(ctx, found ? kNotSymmetric : kPeOutOfRange, operation, pe, local, 0, 0, uint64_t(bytes));
    return false;
  }
};

// A pointer to mapped memory of the PE, for ordinary loads and stores. For an unmapped PE it aborts the job and
// returns `ptr` itself, so that the rest of the kernel stays within this PE's memory.
TSN_DEVICE void* remote(const Context* ctx, void* ptr, int pe) {
  const PeerAccess access(ctx, pe);
  if (!access.validate<Scope::thread>(kOpRemote, ptr, 0)) return ptr;
  if (access.direct()) return access.translate(ptr);
  fail(ctx, kNotDirect, kOpRemote, pe, ptr, 0, 0, 0);
  return ptr;
}

} // namespace tsn
