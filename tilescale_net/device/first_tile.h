// The first tile of a copy, which for most messages is all of it.
#pragma once

#include "scope.h"

namespace tsn {

namespace detail {

// The widest unit, up to 16 bytes, that divides every number of which `bits` is the bitwise or.
TSN_DEVICE uint32_t widest_unit(uint64_t bits) { return (uint32_t(bits) | 16) & (0 - (uint32_t(bits) | 16)); }

} // namespace detail

// Up to Rows units of 16 bytes per thread, or one of 4 or 8. Its loads and its stores are apart, so that the loads are
// in flight while the target is looked up. All threads of a block come here, for the smallest of messages too: what
// only longer ones need stays behind a branch.
//
// Most copies are `complete`: there is nothing after the first tile. Of longer ones the tile is taken only if
// `allow_partial`, for callers that copy the rest afterwards.
//
// The first Group threads of a block take the first Group * Rows units, a row of Group units at a time, the next Group
// threads the units after those. So the place of a thread's own first unit shows whether its warp has any work: warps
// without any leave, and what they execute would only keep the multiprocessor from the others' work.
template <Scope S, int Rows = 1, uint32_t Group = 4 * platform::kWarpThreads>
struct FirstTile {
  static_assert(Group % platform::kWarpThreads == 0, "a group is made of warps");
  uint32_t unit;  // bytes of a unit; 16, or what a copy that is not complete could be cut into
  uint32_t bytes; // that are taken by all threads together, 0 when there is no tile
  bool complete;
  Vec16 wide[Rows] = {};
  uint64_t middle = 0;
  uint32_t narrow = 0;

  TSN_DEVICE FirstTile(const void* dst, const void* src, int64_t count, bool allow_partial = false) {
    unit = detail::widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | uint64_t(count));
    const uint32_t threads = scope_part<S>().threads;
    const uint32_t most = (threads < Group ? threads : threads / Group * Group) * (Rows * 16);
    complete = fits(uint64_t(count), most, threads);
    bytes = complete ? uint32_t(count) : allow_partial && unit == 16 ? most : 0;
  }

  // Whether one warp takes all of a copy whose groups are one warp.
  TSN_DEVICE bool fits_one_warp() const {
    static_assert(S != Scope::block || Group == platform::kWarpThreads, "groups of one warp");
    return complete && fits(bytes, Group * Rows * 16, platform::kWarpThreads);
  }
  // Whether the calling thread's warp has no part in it. Never true in the leader, which has more to do than to copy.
  TSN_DEVICE bool warp_has_no_work() const {
    const uint32_t lane = platform::thread_index() % platform::kWarpThreads;
    return S == Scope::block && complete && platform::thread_index() != lane && place() - lane * unit >= bytes;
  }

  TSN_DEVICE void load(const void* src) {
    const uint32_t at = place();
    const char* p = (const char*)src + at;
    platform::load_data_below(&wide[0], (const Vec16*)p, int(at), int(unit == 16 ? bytes : 0));
    platform::load_data_below(&middle, (const uint64_t*)p, int(at), int(unit == 8 ? bytes : 0));
    platform::load_data_below(&narrow, (const uint32_t*)p, int(at), int(unit == 4 ? bytes : 0));
    if (!more_rows()) return;
    TSN_UNROLL
    for (uint32_t u = 1; u < Rows; u++)
      platform::load_data_below(&wide[u], (const Vec16*)(p + u * row()), int(at + u * row()), int(bytes));
  }
  TSN_DEVICE void store(void* dst) const {
    const uint32_t at = place();
    char* p = (char*)dst + at;
    platform::store_data_below((Vec16*)p, wide[0], int(at), int(unit == 16 ? bytes : 0));
    platform::store_data_below((uint64_t*)p, middle, int(at), int(unit == 8 ? bytes : 0));
    platform::store_data_below((uint32_t*)p, narrow, int(at), int(unit == 4 ? bytes : 0));
    if (!more_rows()) return;
    TSN_UNROLL
    for (uint32_t u = 1; u < Rows; u++)
      platform::store_data_below((Vec16*)(p + u * row()), wide[u], int(at + u * row()), int(bytes));
  }

private:
  // Bytes of a row.
  TSN_DEVICE uint32_t row() const {
    const uint32_t threads = scope_part<S>().threads;
    return (threads < Group ? threads : Group) * 16;
  }
  // The place of the calling thread's first unit, in bytes.
  TSN_DEVICE uint32_t place() const {
    const uint32_t index = scope_part<S>().index;
    if (Rows == 1) return index * unit;
    return unit == 16 ? index / Group * (Group * Rows * 16) + index % Group * 16 : index * unit;
  }
  TSN_DEVICE bool fits(uint64_t count, uint32_t wide_bytes, uint32_t threads) const {
    return count <= (unit == 16 ? wide_bytes : (unit & 12) * threads);
  }
  TSN_DEVICE bool more_rows() const { return Rows > 1 && unit == 16 && bytes > row(); }
};

} // namespace tsn
