// Bulk pushes: by the leader of a block, and by other warps until the leader's ring has its first data.
#pragma once

#include "address.h"
#include "copy.h"

namespace tsn {

// Whether a push goes in bulk. (Not if the first tile is complete: threads that take everything at once need no
// ring.)
template <Engine E, class Tile>
TSN_DEVICE bool goes_in_bulk(const Tile& tile, const void* dst, const void* src, int64_t bytes) {
  return !tile.complete && push_by_size<E>(uint64_t(bytes)) && bulk_by_place<E>(dst, src);
}

namespace detail {

TSN_DEVICE bool may_push(const PeerAccess& access, Operation operation, const void* dst, int64_t bytes,
                         const uint64_t* sig) {
  return sig == nullptr ? access.may_proceed<Scope::thread>(operation, dst, bytes)
                        : access.may_proceed<Scope::thread>(operation, dst, bytes, sig);
}

} // namespace detail

// Warps beside the leader's push the prologue of an aligned bulk push: their loads return in half the time that a
// ring needs for its first stage, and until then nothing would leave the SM. Rows of 16 bytes for each of their
// threads; 0 for none. (With 1024 threads, of low unroll, it takes as long as it saves.)
template <Engine E, int Unroll>
constexpr int kPrologueRows = E == Engine::automatic && Unroll >= 8 ? Unroll / 4 : 0;

// Bytes of the prologue.
template <int Rows>
TSN_DEVICE uint32_t prologue_bytes(const void* dst, const void* src, int64_t bytes) {
  const uint32_t warps = platform::block_threads() / platform::kWarpThreads;
  if (Rows == 0 || warps < 2 || (reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src)) % 16 != 0) return 0;
  const uint32_t all = (warps - 1) * platform::kWarpThreads * (Rows * 16);
  return uint64_t(bytes) < 2 * all ? 0 : all - uint32_t(reinterpret_cast<uint64_t>(dst) + all) % kSegmentBytes;
}

// Pushes the first `prologue` of `bytes`, if PeerAccess::may_proceed() returns true. Called by the threads of all warps
// but the first.
template <int Rows>
TSN_COLD void push_prologue(const Context* ctx, Operation operation, void* dst, const void* src, int64_t bytes, int pe,
                            const uint64_t* sig, uint32_t prologue) {
  constexpr uint32_t kLanes = platform::kWarpThreads;
  const uint32_t warp = platform::thread_index() / kLanes - 1;
  const uint32_t at = warp * (kLanes * Rows * 16) + platform::lane() * 16;
  const Vec16* from = (const Vec16*)((const char*)src + at);
  Vec16 row[Rows];
  TSN_UNROLL
  for (int u = 0; u < Rows; u++)
    platform::load_data_below(&row[u], from + u * kLanes, int(at + u * kLanes * 16), int(prologue));
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!detail::may_push(access, operation, dst, bytes, sig))) return;
  Vec16* peer = (Vec16*)((char*)access.translate(dst) + at);
  TSN_UNROLL
  for (int u = 0; u < Rows; u++)
    platform::store_data_below(peer + u * kLanes, row[u], int(at + u * kLanes * 16), int(prologue));
}

constexpr uint64_t kNotPushed = ~uint64_t(0);

// Copies `bytes` but the first `done` to the PE's `dst`; returns the distance of the PE's heap from this one.
// kNotPushed: PeerAccess::may_proceed() returned false, and nothing was written. A signal word is checked too.
//
// Out of line: code on the path of small messages should use few registers and stay close together.
template <int Stages, int StageBytes>
TSN_COLD uint64_t push_bulk(const Context* ctx, Operation operation, void* dst, const void* src, int64_t bytes, int pe,
                            const uint64_t* sig, void* ring, uint32_t done) {
  const char* from = (const char*)src + done;
  const detail::Cut cut((char*)dst + done, from, uint64_t(bytes - done));
  BulkCopy<Stages, StageBytes> copy(from + cut.head, cut.body, (char*)ring, (char*)dst + done + cut.head);
  const PeerAccess access(ctx, pe); // its loads come before the copy's: all are in flight together
  copy.begin();
  if (TSN_UNLIKELY(!detail::may_push(access, operation, dst, bytes, sig))) {
    copy.cancel();
    return kNotPushed;
  }
  char* peer = (char*)access.translate(dst) + done;
  copy.finish(peer + cut.head);
  detail::copy_edges(peer, from, cut, {0, 1});
  return access.base - access.heap_base;
}

// All of it, by all threads of a block; returns push_bulk()'s result to the leader. The bytes are stored when the
// block is synchronised after.
template <Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE uint64_t push_bulk_by_block(const Context* ctx, Operation operation, void* dst, const void* src,
                                       int64_t bytes, int pe, const uint64_t* sig, void* ring) {
  constexpr int kRows = kPrologueRows<E, Unroll>;
  const uint32_t prologue = prologue_bytes<kRows>(dst, src, bytes);
  if (scope_leader<Scope::block>())
    return push_bulk<Stages, StageBytes>(ctx, operation, dst, src, bytes, pe, sig, ring, prologue);
  if constexpr (kRows > 0)
    if (platform::thread_index() >= platform::kWarpThreads)
      push_prologue<kRows>(ctx, operation, dst, src, bytes, pe, sig, prologue);
  return kNotPushed;
}

} // namespace tsn
