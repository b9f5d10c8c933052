// Signals: 64-bit words of the heap that one PE changes and another waits for.
#pragma once

#include "address.h"
#include "proxy_ops.h"
#include "push_bulk.h"

namespace tsn {

namespace detail {

TSN_COLD void signal_by_proxy(const Context* ctx, uint64_t* sig, uint64_t value, int pe, SignalOp op, bool fenced) {
  if (fenced) queue_fence(ctx, pe);
  queue_signal<false>(ctx, sig, value, pe, op);
}
// A put_signal rejected by PeerAccess::may_proceed(), by the leader: to an unmapped PE, or none at all.
template <SignalOp Op>
TSN_COLD void put_signal_by_proxy_or_fail(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe,
                                          uint64_t* sig, uint64_t value) {
  const PeerAccess access(ctx, pe);
  if (access.validate<Scope::thread>(kOpPutSignal, dst, bytes, sig) && !access.aborted)
    queue_put_signal(ctx, dst, src, bytes, pe, sig, value, Op);
}

// Changes a signal word after everything that happened before. A release covers other threads' work before a barrier
// with the calling thread, so one thread can send the signal of a whole block.
template <SignalOp Op>
TSN_DEVICE void release_signal(uint64_t* word, uint64_t value) {
  if constexpr (Op == SignalOp::set) platform::store<Order::release, MemScope::sys>(word, value);
  else platform::add_release(word, value);
}

// signal() for a known PE, an address that was checked or belongs to the package, and a caller that has made the
// platform's fence at system scope. For mapped memory that fence orders earlier puts too; otherwise, and in the
// simulator, `Fence` does.
template <SignalOp Op, bool Fence = false>
TSN_DEVICE void send_signal(const PeerAccess& access, uint64_t* sig, uint64_t value) {
  if (TSN_UNLIKELY(access.aborted)) return;
  if (TSN_UNLIKELY(!access.direct())) return signal_by_proxy(access.ctx, sig, value, access.pe, Op, Fence);
  uint64_t* peer = access.translate(sig);
  if constexpr (platform::kDefersRemoteWrites && Fence) platform::defer_fence(access.ctx, access.pe);
  if constexpr (platform::kDefersRemoteWrites)
    if (platform::defer_signal(access.ctx, sig, peer, value, Op, access.pe)) return;
  if constexpr (Op == SignalOp::set) platform::store<Order::relaxed, MemScope::sys>(peer, value);
  else platform::add_relaxed(peer, value);
}

// Data and signal in one store, if they share an aligned packet of 16 bytes: no reader sees one without the other, so
// the signal need not wait for the data. The store orders nothing else, like put_signal.
template <SignalOp Op, class Tile>
TSN_DEVICE bool fits_packet(const Tile& tile, const void* dst, const uint64_t* sig) {
  const uint64_t apart = reinterpret_cast<uint64_t>(dst) ^ reinterpret_cast<uint64_t>(sig);
  return platform::kHasAtomic16b && Op == SignalOp::set && tile.unit == 8 && tile.bytes == 8 && apart == 8;
}
TSN_DEVICE void put_packet(char* peer, uint64_t data, uint64_t value) {
  const uint64_t at = reinterpret_cast<uint64_t>(peer);
  const uint64_t first = at % 16 == 0 ? data : value, second = at % 16 == 0 ? value : data;
  platform::store_16b((Vec16*)(at - at % 16),
                      Vec16{uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32)});
}

// A put_signal that one warp takes whole, by that warp; of one unit or none by the leader.
template <Scope S, SignalOp Op, class Tile>
TSN_DEVICE void put_signal_one_warp(Tile& tile, const Context* ctx, void* dst, const void* src, int64_t bytes, int pe,
                                    uint64_t* sig, uint64_t value) {
  const bool leader = scope_leader<S>(), single_lane = tile.bytes <= tile.unit;
  if (single_lane && !leader) return;
  tile.load(src); // first, before anything that waits for the access
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!access.may_proceed<Scope::thread>(kOpPutSignal, dst, bytes, sig))) {
    if (leader) put_signal_by_proxy_or_fail<Op>(ctx, dst, src, bytes, pe, sig, value);
    return;
  }
  char* peer = (char*)access.translate(dst);
  if (single_lane && fits_packet<Op>(tile, dst, sig)) return put_packet(peer, tile.middle, value);
  tile.store(peer);
  if (!single_lane) platform::warp_sync();
  if (leader) release_signal<Op>(access.translate(sig), value);
}

} // namespace detail

// Sets or adds to a signal word of the PE, after everything that the calling thread and, through barriers, others did
// before. With `Fence` also after all earlier puts to the PE, as if fence() came first, at half its cost on the
// direct path. Called by one thread.
template <SignalOp Op, bool Fence = false>
TSN_DEVICE void signal(const Context* ctx, uint64_t* sig, uint64_t value, int pe) {
  if constexpr (Fence) enter<Scope::thread>(kOpFence, nullptr, 0, pe);
  enter<Scope::thread>(kOpSignal, nullptr, 0, pe, sig, value, Op);
  const PeerAccess access(ctx, pe);
  platform::fence<MemScope::sys>(); // the loads of `access` are in flight meanwhile
  if (TSN_LIKELY(access.validate<Scope::thread>(kOpSignal, sig, sizeof(*sig))))
    detail::send_signal<Op, Fence>(access, sig, value);
}

// The same by all threads of the scope, after everything before it in any of them; the leader sends it.
template <Scope S, SignalOp Op, bool Fence>
TSN_DEVICE void signal(const Context* ctx, uint64_t* sig, uint64_t value, int pe) {
  scope_sync<S>();
  if (scope_leader<S>()) signal<Op, Fence>(ctx, sig, value, pe);
}

// Puts `bytes` and, after their arrival, changes the PE's signal word. Called by all threads of the scope with equal
// arguments.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes, SignalOp Op>
TSN_DEVICE void put_signal(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                           uint64_t value, void* ring) {
  FirstTile<S, kFirstTileRows<S>, platform::kWarpThreads> tile(dst, src, bytes,
                                                               kTileBeforeLongCopy<S, E, Unroll, Stages>);
  publish_to_bulk<S, E, Stages>(bytes);
  scope_enter<S>(kOpPutSignal, dst, src, bytes, pe, sig, value, Op); // the scope's writes to the source are sent
  const bool leader = scope_leader<S>();
  if (!platform::kDefersRemoteWrites && TSN_LIKELY(tile.fits_one_warp())) {
    if (S == Scope::block && platform::thread_index() >= platform::kWarpThreads) return;
    return detail::put_signal_one_warp<S, Op>(tile, ctx, dst, src, bytes, pe, sig, value);
  }
  if (!platform::kDefersRemoteWrites && tile.warp_has_no_work()) return scope_sync<S>();
  if constexpr (kMayPushInBulk<S, E, Stages>) {
    if (TSN_UNLIKELY(goes_in_bulk<E>(tile, dst, src, bytes))) {
      const uint64_t distance =
          push_bulk_by_block<E, Unroll, Stages, StageBytes>(ctx, kOpPutSignal, dst, src, bytes, pe, sig, ring);
      scope_sync<S>();
      if (!leader) return;
      if constexpr (platform::kDefersRemoteWrites)
        if (distance != kNotPushed) platform::signalling(sig, pe, value, Op);
      if (TSN_LIKELY(distance != kNotPushed)) detail::release_signal<Op>((uint64_t*)((char*)sig + distance), value);
      else detail::put_signal_by_proxy_or_fail<Op>(ctx, dst, src, bytes, pe, sig, value);
      return;
    }
  }
  tile.load(src);
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!access.may_proceed<S>(kOpPutSignal, dst, bytes, sig))) {
    if (leader) detail::put_signal_by_proxy_or_fail<Op>(ctx, dst, src, bytes, pe, sig, value);
    return scope_sync<S>();
  }
  char* peer = (char*)access.translate(dst);
  uint64_t* peer_sig = access.translate(sig);
  if constexpr (platform::kDefersRemoteWrites) {
    if (scope_deferred<S>([&] {
          return access.aborted || platform::defer_put_signal(ctx, dst, peer, src, bytes, pe, sig, peer_sig, value, Op);
        }))
      return;
    if (tile.warp_has_no_work()) return scope_sync<S>();
  }
  tile.store(peer);
  if (TSN_UNLIKELY(!tile.complete))
    copy_pushed<S, E, Unroll, Stages, StageBytes>(peer, (const char*)src, bytes, ring, tile.bytes);
  scope_sync<S>();
  if (leader) detail::release_signal<Op>(peer_sig, value);
}

} // namespace tsn
