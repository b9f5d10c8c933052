// Puts: writing to another PE's symmetric memory.
#pragma once

#include "address.h"
#include "proxy_ops.h"
#include "push_bulk.h"

namespace tsn {

namespace detail {

// A put that PeerAccess::may_proceed() did not let through, by the leader: to a PE that is not mapped, or none at all.
TSN_COLD void put_by_proxy_or_fail(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  const PeerAccess access(ctx, pe);
  if (access.validate<Scope::thread>(kOpPut, dst, bytes) && !access.aborted) queue_put(ctx, dst, src, bytes, pe);
}
TSN_COLD void put_value_by_proxy(const Context* ctx, void* dst, uint64_t value, int bytes, int pe) {
  queue_put_value(ctx, dst, value, bytes, pe);
}

} // namespace detail

// Copies `bytes` from `src` to the PE's `dst`, given by its local address. By all threads of the scope with equal
// arguments. `ring` is Stages * StageBytes bytes of shared memory for the bulk engine.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void put(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, void* ring) {
  FirstTile<S, kFirstTileRows<S>> tile(dst, src, bytes, kTileBeforeLongCopy<S, E, Unroll, Stages>);
  publish_to_bulk<S, E, Stages>(bytes);
  scope_enter<S>(kOpPut, dst, src, bytes, pe); // what the scope wrote to the source is sent
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
  tile.load(src); // first, so that nothing that waits for the access comes before it
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

// Keeps `value` from taking part in the deduction of T.
template <class T>
struct Value {
  using type = T;
};

// Writes one value of 1, 2, 4 or 8 bytes. By one thread.
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

} // namespace tsn
