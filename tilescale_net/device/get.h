// Gets: reading from another PE's symmetric memory.
#pragma once

#include "address.h"
#include "copy.h"
#include "proxy_ops.h"

namespace tsn {

namespace detail {

TSN_COLD void get_by_proxy(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  queue_wait(ctx, queue_get(ctx, dst, src, bytes, pe), kOpGet);
}

} // namespace detail

// Copies `bytes` from the PE's `src`, given by its local address, to `dst`, which all threads of the scope can read on
// return. By all threads of the scope with equal arguments; `ring` as for put.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void get(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, void* ring) {
  // The ends are aligned alike here and there: every heap begins on a page.
  FirstTile<S> tile(dst, src, bytes);
  scope_enter<S>(kOpGet, dst, src, bytes, pe); // threads that still read the destination have done so
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
