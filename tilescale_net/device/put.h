// Puts and gets: writing to another PE's symmetric memory, and reading from it.
#pragma once

#include "address.h"
#include "copy.h"
#include "proxy_ops.h"
#include "push_bulk.h"
#include "signal.h"

namespace tsn {

namespace detail {

// A put rejected by PeerAccess::may_proceed(), by the leader: to an unmapped PE, or none at all.
TSN_COLD void put_by_proxy_or_fail(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  const PeerAccess access(ctx, pe);
  if (access.validate<Scope::thread>(kOpPut, dst, bytes) && !access.aborted) queue_put(ctx, dst, src, bytes, pe);
}
TSN_COLD void put_value_by_proxy(const Context* ctx, void* dst, uint64_t value, int bytes, int pe) {
  queue_put_value(ctx, dst, value, bytes, pe);
}

} // namespace detail

// Copies `bytes` from `src` to the PE's `dst`, given by its local address. Called by all threads of the scope with
// equal arguments. `ring` is Stages * StageBytes bytes of shared memory for the bulk engine.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void put(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, void* ring) {
  FirstTile<S, kFirstTileRows<S>> tile(dst, src, bytes, kTileBeforeLongCopy<S, E, Unroll, Stages>);
  publish_to_bulk<S, E, Stages>(bytes);
  scope_enter<S>(kOpPut, dst, src, bytes, pe); // the scope's writes to the source are sent
  if (!platform::kDefersRemoteWrites && tile.warp_has_no_work()) return;
  if constexpr (kMayPushInBulk<S, E, Stages>) {
    if (TSN_UNLIKELY(goes_in_bulk<E>(tile, dst, src, bytes))) {
      const uint64_t distance =
          push_bulk_by_block<E, Unroll, Stages, StageBytes>(ctx, kOpPut, dst, src, bytes, pe, nullptr, ring);
      if (TSN_UNLIKELY(scope_leader<S>() && distance == kNotPushed))
        detail::put_by_proxy_or_fail(ctx, dst, src, bytes, pe);
      return;
    }
  }
  tile.load(src); // first, before anything that waits for the access
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!access.may_proceed<S>(kOpPut, dst, bytes))) {
    if (scope_leader<S>()) detail::put_by_proxy_or_fail(ctx, dst, src, bytes, pe);
    return;
  }
  char* peer = (char*)access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_deferred<S>([&] { return access.aborted || platform::defer_put(ctx, dst, peer, src, bytes, pe); }))
      return;
  if (platform::kDefersRemoteWrites && (access.aborted || tile.warp_has_no_work())) return;
  tile.store(peer);
  if (TSN_LIKELY(tile.complete)) return;
  copy_pushed<S, E, Unroll, Stages, StageBytes>(peer, (const char*)src, bytes, ring, tile.bytes);
}

// Excludes `value` from the deduction of T.
template <class T>
struct Value {
  using type = T;
};

// Writes one value of 1, 2, 4 or 8 bytes. Called by one thread.
template <class T>
TSN_DEVICE void put_value(const Context* ctx, T* dst, typename Value<T>::type value, int pe) {
  static_assert(sizeof(T) <= 8, "put_value moves up to 8 bytes");
  enter<Scope::thread>(kOpPutValue, dst, sizeof(T), pe);
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!access.validate<Scope::thread>(kOpPutValue, dst, sizeof(T)) || access.aborted)) return;
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  if (TSN_UNLIKELY(!access.direct())) return detail::put_value_by_proxy(ctx, dst, bits, sizeof(T), pe);
  T* peer = access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites)
    if (platform::defer_put_value(ctx, dst, peer, bits, sizeof(T), pe)) return;
  platform::store_data(peer, value);
}

// --- puts from shared memory -----------------------------------------------------------------------------------------
// Puts whose source is shared memory: a tile goes straight to mapped memory of a PE.
//
// The source is read during the call, by the threads that store it: after a barrier of the scope it may be written
// again. A PE that is not mapped is an error, because the fabric reads symmetric memory only.

namespace detail {

template <int U, class T>
TSN_DEVICE void copy_shared_units(T* dst, const T* src, uint32_t count, Part part) {
  TSN_ROLLED
  for (uint32_t at = part.index; at < count; at += part.threads * U) {
    T row[U];
    TSN_UNROLL
    for (uint32_t u = 0; u < U; u++)
      if (at + u * part.threads < count) row[u] = src[at + u * part.threads];
    TSN_UNROLL
    for (uint32_t u = 0; u < U; u++)
      if (at + u * part.threads < count) platform::store_data(dst + at + u * part.threads, row[u]);
  }
}

// A block has less than 2^32 bytes of shared memory.
TSN_COLD void copy_shared(char* dst, const char* src, uint32_t bytes, Part part) {
  const uint32_t unit = widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes);
  with_unit(unit, [&](auto tag) {
    using T = typename decltype(tag)::type;
    copy_shared_units<4>((T*)dst, (const T*)src, uint32_t(bytes / sizeof(T)), part);
  });
}

// put_shared, and with a signal word put_signal_shared.
template <Scope S, SignalOp Op>
TSN_DEVICE void push_shared(const Context* ctx, char* dst, const char* src, int64_t bytes, int pe, uint64_t* sig,
                            uint64_t value) {
  const Operation operation = sig == nullptr ? kOpPut : kOpPutSignal;
  scope_enter<S>(operation, dst, src, bytes, pe, sig, value, Op); // the scope's writes to the source are sent
  const PeerAccess access(ctx, pe);
  const bool fine =
      sig == nullptr ? access.validate<S>(operation, dst, bytes) : access.validate<S>(operation, dst, bytes, sig);
  if (TSN_UNLIKELY(!fine)) return;
  if (TSN_UNLIKELY(!access.direct())) {
    if (scope_leader<S>() && !access.aborted) fail(ctx, kNotDirect, operation, pe, dst, 0, 0, uint64_t(bytes));
    return;
  }
  char* peer = access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites) {
    if (scope_deferred<S>([&] {
          if (access.aborted) return true;
          return sig == nullptr ? platform::defer_put(ctx, dst, peer, src, bytes, pe)
                                : platform::defer_put_signal(ctx, dst, peer, src, bytes, pe, sig, access.translate(sig),
                                                             value, Op);
        }))
      return;
  } else if (TSN_UNLIKELY(access.aborted)) {
    return sig == nullptr ? void() : scope_sync<S>();
  }
  if constexpr (S == Scope::thread) {
    const struct {
      uint32_t unit;
      int64_t bytes;
    } tile = {widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | uint64_t(bytes)), bytes};
    if (sig != nullptr && fits_packet<Op>(tile, dst, sig)) return put_packet(peer, *(const uint64_t*)src, value);
  }
  if (bytes > 0) copy_shared(peer, src, uint32_t(bytes), scope_part<S>());
  if (sig == nullptr) return;
  scope_sync<S>();
  if (scope_leader<S>()) release_signal<Op>(access.translate(sig), value);
}

} // namespace detail

// As put. Called by all threads of the scope with equal arguments.
template <Scope S>
TSN_DEVICE void put_shared(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  detail::push_shared<S, SignalOp::set>(ctx, (char*)dst, (const char*)src, bytes, pe, nullptr, 0);
}

// As put_signal.
template <Scope S, SignalOp Op>
TSN_DEVICE void put_signal_shared(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                                  uint64_t value) {
  detail::push_shared<S, Op>(ctx, (char*)dst, (const char*)src, bytes, pe, sig, value);
}

// --- gets ------------------------------------------------------------------------------------------------------------

namespace detail {

TSN_COLD void get_by_proxy(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  queue_wait(ctx, queue_get(ctx, dst, src, bytes, pe), kOpGet);
}

} // namespace detail

// Copies `bytes` from the PE's `src`, given by its local address, to `dst`, which all threads of the scope can read on
// return. Called by all threads of the scope with equal arguments; `ring` as for put.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void get(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, void* ring) {
  // Both ends have equal alignment: every heap begins on a page.
  FirstTile<S> tile(dst, src, bytes);
  scope_enter<S>(kOpGet, dst, src, bytes, pe); // waits for threads that still read the destination
  if (!platform::kDefersRemoteWrites && tile.warp_has_no_work()) return scope_sync<S>();
  const PeerAccess access(ctx, pe);
  if (TSN_LIKELY(access.validate<S>(kOpGet, src, bytes))) {
    if constexpr (platform::kDefersRemoteWrites)
      if (scope_leader<S>()) platform::inspect(kOpGet, dst, bytes);
    if (TSN_UNLIKELY(!access.direct())) {
      if (scope_leader<S>() && !access.aborted) detail::get_by_proxy(ctx, dst, src, bytes, pe);
    } else if (TSN_LIKELY(!access.aborted && !tile.warp_has_no_work())) {
      const char* peer = access.translate((const char*)src);
      tile.load(peer);
      if (TSN_LIKELY(tile.complete)) tile.store(dst);
      else copy<S, E, Unroll, Stages, StageBytes>((char*)dst, peer, bytes, ring, Direction::pull);
    }
  }
  scope_sync<S>();
}

} // namespace tsn
