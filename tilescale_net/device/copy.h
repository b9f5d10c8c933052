// Copies between two mapped addresses: the two engines of the direct path and the choice between them.
#pragma once

#include "platform.h"
#include "scope.h"

namespace tsn {

// --- the bulk engine -------------------------------------------------------------------------------------------------
// The bulk engine: a ring of stages in shared memory that one thread fills from the source and empties to the target.

// Bulk copies are fast where their parts begin at multiples of this many bytes, at both ends.
constexpr uint32_t kSegmentBytes = 128;

// A copy of `bytes`, a multiple of 16, between aligned addresses (16 bytes), by one thread of the block; `ring` is
// Stages * StageBytes bytes of shared memory, 128-byte aligned. After begin() its first loads are in flight, while the
// target may still be unknown; then comes either finish() or cancel(), and both leave the ring free.
//
// All stages but one are loaded ahead; the last one is left for the store in flight. Stages have constant offsets in
// unrolled loops: one thread does everything, and each load and store would otherwise take it twice as long. (Several
// threads with their own stages gain nothing: the limits are that the SM issues one bulk copy in about 45 cycles, and
// that loads move 64 bytes a cycle.)
template <int Stages, int StageBytes>
class BulkCopy {
public:
  // `aligned_end`: source or target, at whose segments the stages shall begin.
  TSN_DEVICE BulkCopy(const char* source, uint64_t bytes, char* ring_memory, const void* aligned_end)
      : loaded(platform::stage_barriers<Stages>()), ring(ring_memory), src(source), to_load(bytes), to_store(bytes),
        skew(reinterpret_cast<uint64_t>(aligned_end) % kSegmentBytes) {
    // A copy that fits the ring uses equal parts of all stages, so that the first data leave early.
    constexpr uint32_t kUnit = kSegmentBytes * Stages;
    const uint64_t room = bytes + skew;
    part = room < uint64_t(Stages) * StageBytes ? (uint32_t(room) + kUnit - 1) / kUnit * kSegmentBytes : StageBytes;
    load_room = store_room = part - skew;
    each([&](int s) { platform::barrier_init(loaded + s); });
    platform::bulk_fence(); // the barriers and the ring were written by ordinary accesses
  }

  TSN_DEVICE void begin() {
    each([&](int s) {
      if (s < Stages - 1 || to_load <= part) load(s); // nothing follows the end
    });
  }

  // On return all bytes are stored, as if by ordinary stores of this thread.
  TSN_DEVICE void finish(char* dst) {
    uint32_t parity = 0;
    TSN_ROLLED
    for (; to_store != 0; parity ^= 1) {
      each([&](int s) {
        if (to_store == 0) return;
        const uint32_t size = to_store < store_room ? uint32_t(to_store) : store_room;
        platform::barrier_wait(loaded + s, parity);
        platform::bulk_store(dst, ring + s * StageBytes, size);
        platform::bulk_commit();
        dst += size;
        to_store -= size;
        store_room = part;
        if (to_load == 0) return;
        platform::bulk_wait_read<1>(); // the stage before this one has left shared memory
        load(s == 0 ? Stages - 1 : s - 1);
      });
    }
    retire();
    platform::bulk_wait<0>();
  }

  // Ends the copy before its first store.
  TSN_DEVICE void cancel() {
    uint64_t left = to_store - to_load + skew;
    each([&](int s) {
      if (left == 0) return;
      platform::barrier_wait(loaded + s, 0);
      left -= left < part ? left : part;
    });
    retire();
  }

private:
  uint64_t* loaded;
  char* ring;
  const char* src;
  uint64_t to_load, to_store;
  uint32_t skew; // bytes by which the first stage is shorter than the others, so that those begin with a segment
  uint32_t part; // bytes of a stage
  uint32_t load_room, store_room; // the same of the next one

  // f(stage) for all stages.
  template <class F>
  TSN_DEVICE static void each(F f) {
    if constexpr (Stages <= 8) {
      TSN_UNROLL
      for (int s = 0; s < Stages; s++) f(s);
    } else {
      TSN_ROLLED
      for (int s = 0; s < Stages; s++) f(s);
    }
  }
  TSN_DEVICE void load(int s) {
    if (to_load == 0) return;
    const uint32_t size = to_load < load_room ? uint32_t(to_load) : load_room;
    platform::barrier_expect(loaded + s, size);
    platform::bulk_load(ring + s * StageBytes, src, size, loaded + s);
    src += size;
    to_load -= size;
    load_room = part;
  }
  TSN_DEVICE void retire() const {
    each([&](int s) { platform::barrier_retire(loaded + s); });
  }
};

// The same for a target known from the start. Out of line, like push_bulk(): code on the path of small copies should
// use few registers and stay close together.
template <int Stages, int StageBytes>
TSN_COLD void copy_bulk(char* dst, const char* src, uint64_t bytes, char* ring) {
  platform::bulk_publish();
  BulkCopy<Stages, StageBytes> copy(src, bytes, ring, dst);
  copy.begin();
  copy.finish(dst);
}

// --- the first tile --------------------------------------------------------------------------------------------------
// The first tile of a copy, for most messages the whole copy.

namespace detail {

// The widest unit, up to 16 bytes, that divides every number of which `bits` is the bitwise or.
TSN_DEVICE uint32_t widest_unit(uint64_t bits) { return (uint32_t(bits) | 16) & (0 - (uint32_t(bits) | 16)); }

} // namespace detail

// Up to Rows units of 16 bytes per thread, or one of 4 or 8. Its loads and its stores are separate, so that the loads
// are in flight during the look-up of the target. All threads of a block come here, even for the smallest messages:
// code for longer ones stays behind a branch.
//
// Most copies are `complete`: nothing follows the first tile. Longer ones take a tile only with `allow_partial`, for
// callers that copy the rest afterwards.
//
// The first Group threads of a block take the first Group * Rows units, a row of Group units at a time, the next
// Group threads the following units. So the offset of a thread's first unit shows whether its warp has any work: warps
// without any leave, because their instructions would only delay the SM's other work.
template <Scope S, int Rows = 1, uint32_t Group = 4 * platform::kWarpThreads>
struct FirstTile {
  static_assert(Group % platform::kWarpThreads == 0, "a group is made of warps");
  uint32_t unit;  // bytes of a unit, the widest that addresses and count allow
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
  // Whether the calling thread's warp has no part in it. Never true in the leader, which does more than copy.
  TSN_DEVICE bool warp_has_no_work() const {
    const uint32_t lane = platform::thread_index() % platform::kWarpThreads;
    return S == Scope::block && complete && platform::thread_index() != lane && offset() - lane * unit >= bytes;
  }

  TSN_DEVICE void load(const void* src) {
    const uint32_t at = offset();
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
    const uint32_t at = offset();
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
  // Byte offset of the calling thread's first unit.
  TSN_DEVICE uint32_t offset() const {
    const uint32_t index = scope_part<S>().index;
    if (Rows == 1) return index * unit;
    return unit == 16 ? index / Group * (Group * Rows * 16) + index % Group * 16 : index * unit;
  }
  TSN_DEVICE bool fits(uint64_t count, uint32_t wide_bytes, uint32_t threads) const {
    return count <= (unit == 16 ? wide_bytes : (unit & 12) * threads);
  }
  TSN_DEVICE bool more_rows() const { return Rows > 1 && unit == 16 && bytes > row(); }
};

// --- copies ----------------------------------------------------------------------------------------------------------

namespace detail {

template <class T>
struct Unit {
  using type = T;
};
// f(Unit<T>) with the type of that many bytes. (Tests of single bits, because a switch would become a table in memory.)
template <class F>
TSN_DEVICE void with_unit(uint32_t unit, F f) {
  if (unit & 16) return f(Unit<Vec16>());
  if (unit & 8) return f(Unit<uint64_t>());
  if (unit & 4) return f(Unit<uint32_t>());
  if (unit & 2) return f(Unit<uint16_t>());
  f(Unit<uint8_t>());
}

// Copies fewer than part.threads * U units. A group of Lanes threads moves U rows of Lanes units each, loading all rows
// before it stores the first: one latency for the whole rest, of any size.
template <int U, uint32_t Lanes, class T>
TSN_DEVICE void copy_rest(T* dst, const T* src, uint32_t count, Part part) {
  if constexpr (U > 1)
    if (count <= part.threads * (U / 2)) return copy_rest<U / 2, Lanes>(dst, src, count, part);
  const uint32_t first = part.index / Lanes * (Lanes * U) + part.index % Lanes;
  const int left = int(count - first);
  T row[U];
  TSN_UNROLL
  for (int u = 0; u < U; u++) platform::load_data_below(&row[u], src + first + u * Lanes, int(u * Lanes), left);
  TSN_UNROLL
  for (int u = 0; u < U; u++) platform::store_data_below(dst + first + u * Lanes, row[u], int(u * Lanes), left);
}

// Copies `count` units; threads are whole groups of Lanes.
template <int U, uint32_t Lanes, class T>
TSN_DEVICE void copy_units(T* dst, const T* src, uint64_t count, Part part) {
  const uint32_t first = part.index / Lanes * (Lanes * U) + part.index % Lanes;
  const uint32_t tile = part.threads * U;
  TSN_ROLLED
  for (; count >= tile; count -= tile, src += tile, dst += tile) {
    T row[U];
    TSN_UNROLL
    for (int u = 0; u < U; u++) row[u] = platform::load_data(src + first + u * Lanes);
    TSN_UNROLL
    for (int u = 0; u < U; u++) platform::store_data(dst + first + u * Lanes, row[u]);
  }
  if (count != 0) copy_rest<U, Lanes>(dst, src, uint32_t(count), part);
}

// A copy cut into whole units of the widest kind in which both ends can be aligned, and the bytes before and after
// them.
struct Cut {
  uint32_t unit, head, tail;
  uint64_t body;

  TSN_DEVICE Cut(const char* dst, const char* src, uint64_t bytes) {
    unit = widest_unit(reinterpret_cast<uint64_t>(dst) ^ reinterpret_cast<uint64_t>(src));
    const uint64_t lead = (0 - reinterpret_cast<uint64_t>(dst)) & (unit - 1);
    head = uint32_t(lead < bytes ? lead : bytes);
    tail = uint32_t(bytes - head) & (unit - 1);
    body = bytes - head - tail;
  }
};

// Head and tail, fewer than 16 bytes each; they move in units that divide them and the addresses.
TSN_COLD void copy_edges(char* dst, const char* src, uint32_t head, uint64_t body, uint32_t tail, Part part) {
  const uint32_t unit = widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | head | tail);
  with_unit(unit & 15, [&](auto tag) {
    using T = typename decltype(tag)::type;
    TSN_ROLLED
    for (uint32_t at = part.index * sizeof(T); at < head + tail; at += part.threads * sizeof(T)) {
      const uint64_t offset = at < head ? at : body + at;
      platform::store_data((T*)(dst + offset), platform::load_data((const T*)(src + offset)));
    }
  });
}
TSN_DEVICE void copy_edges(char* dst, const char* src, const Cut& cut, Part part) {
  if (cut.head + cut.tail != 0) copy_edges(dst, src, cut.head, cut.body, cut.tail, part);
}

template <int U, uint32_t Lanes>
TSN_COLD void copy_narrow(char* dst, const char* src, uint64_t bytes, uint32_t unit, Part part) {
  with_unit(unit & 15, [&](auto tag) {
    using T = typename decltype(tag)::type;
    copy_units<U, Lanes>((T*)dst, (const T*)src, bytes / sizeof(T), part);
  });
}
// Only the widest units are copied inline: nvcc took as long for the four others as for the rest of a kernel.
template <int U, uint32_t Lanes>
TSN_DEVICE void copy_whole_units(char* dst, const char* src, uint64_t bytes, uint32_t unit, Part part) {
  if (TSN_LIKELY(unit & 16)) copy_units<U, Lanes>((Vec16*)dst, (const Vec16*)src, bytes / 16, part);
  else copy_narrow<(U < 4 ? U : 4), Lanes>(dst, src, bytes, unit, part);
}

// The ldst engine: whole units, by all threads of the scope.
template <Scope S, int Unroll>
TSN_DEVICE void copy_body(char* dst, const char* src, uint64_t body, uint32_t unit, Part part) {
  static_assert(Unroll >= 1 && Unroll <= 64, "unroll is 1 to 64");
  constexpr uint32_t kLanes = S == Scope::thread ? 1 : platform::kWarpThreads;
  if (S == Scope::block && platform::block_threads() < kLanes) // not one row
    return copy_whole_units<1, 1>(dst, src, body, unit, part);
  if (S == Scope::block) part.threads -= part.threads % kLanes; // rows need whole warps
  if (part.index >= part.threads) return;
  copy_whole_units<Unroll, kLanes>(dst, src, body, unit, part);
}

} // namespace detail

enum class Direction { push, pull };

// Sizes from which the bulk engine beats the ldst engine, measured on two H200 over NVLink; the only place of these
// figures. A push keeps the ring's loads in flight during the look-up of its target. A pull cannot, and is faster
// only with more memory in flight.
constexpr uint64_t kBulkPushFrom = 32 * 1024;
constexpr uint64_t kBulkPullFrom = 128 * 1024;
constexpr uint32_t kEnoughInFlight = 64 * 1024;

// Modulus on which the ends of a bulk copy must agree. The hardware moves bytes to another offset within a segment at
// half its rate or less, so `automatic` leaves such copies to the ldst engine.
template <Engine E>
constexpr uint64_t kBulkAlike = E == Engine::bulk ? 16 : kSegmentBytes;
template <Engine E>
TSN_DEVICE bool bulk_by_place(const void* dst, const void* src) {
  return (reinterpret_cast<uint64_t>(dst) ^ reinterpret_cast<uint64_t>(src)) % kBulkAlike<E> == 0;
}

template <Scope S, Engine E, int Stages>
constexpr bool kMayBeBulk = S == Scope::block && E != Engine::ldst && Stages > 1 && platform::kHasBulk;
// Pushes that start in bulk before the target is known; see push_bulk.h.
template <Scope S, Engine E, int Stages>
constexpr bool kMayPushInBulk = kMayBeBulk<S, E, Stages> && !platform::kDefersRemoteWrites;

// Whether the number of bytes selects the bulk engine.
template <Engine E>
TSN_DEVICE bool push_by_size(uint64_t bytes) {
  return bytes >= (E == Engine::bulk ? 16 : kBulkPushFrom);
}
template <Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE bool pull_by_size(uint64_t bytes, uint32_t threads) {
  if (E == Engine::bulk) return bytes >= 16;
  constexpr uint32_t kRingInFlight = (Stages - 1) * StageBytes;
  const uint32_t ldst_in_flight = threads * Unroll * 16;
  return bytes >= kBulkPullFrom && (kRingInFlight > kEnoughInFlight || kRingInFlight > ldst_in_flight);
}

// Before the barrier of a push: makes a thread's writes to the source visible to bulk copies of the leader. The CUDA
// programming guide requires this fence of the writing thread, not of the copying one.
template <Scope S, Engine E, int Stages>
TSN_DEVICE void publish_to_bulk(int64_t bytes) {
  if constexpr (kMayBeBulk<S, E, Stages>)
    if (TSN_UNLIKELY(push_by_size<E>(uint64_t(bytes)))) platform::bulk_publish();
}

// Rows of the first tile of a push. Threads with at most this many accesses in flight also take a first tile of
// longer copies, unless these go in bulk; others would wait for the tile before they fill their many registers.
template <Scope S>
constexpr int kFirstTileRows = S == Scope::block ? 4 : 1;
template <Scope S, Engine E, int Unroll, int Stages>
constexpr bool kTileBeforeLongCopy =
    S == Scope::block && Unroll <= kFirstTileRows<S> && E != Engine::bulk && !kMayPushInBulk<S, E, Stages>;

// Copies any number of bytes between any addresses, with the engine that the caller or, for `automatic`, the table
// above chooses. Called by all threads of the scope, which is synchronised before; the bytes are stored when it is
// synchronised after. The first `done` bytes have been copied already.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void copy(char* dst, const char* src, uint64_t bytes, void* ring, Direction direction, uint32_t done = 0) {
  static_assert(E != Engine::bulk || S == Scope::block, "the bulk engine works at block scope");
  static_assert(E != Engine::bulk || (Stages > 1 && StageBytes > 0), "the bulk engine needs two stages or more");
  Part part = scope_part<S>();
  [[maybe_unused]] const uint64_t all = bytes;
  dst += done, src += done, bytes -= done;
  if constexpr (kMayBeBulk<S, E, Stages>) {
    static_assert(StageBytes % kSegmentBytes == 0 && StageBytes < (1 << 20),
                  "a stage is a multiple of 128 bytes below 1 MiB");
    const bool by_size = direction == Direction::push ? push_by_size<E>(all)
                                                      : pull_by_size<E, Unroll, Stages, StageBytes>(all, part.threads);
    if (TSN_UNLIKELY(by_size)) {
      const detail::Cut cut(dst, src, bytes);
      if (bulk_by_place<E>(dst, src) && cut.body != 0) {
        if (part.index == 0) copy_bulk<Stages, StageBytes>(dst + cut.head, src + cut.head, cut.body, (char*)ring);
        detail::copy_edges(dst, src, cut, part);
        return;
      }
    }
  }
  // Otherwise the rest would be computed before the loop around the call, in too many registers.
  dst = platform::opaque(dst), src = platform::opaque(src), bytes = platform::opaque(bytes);
  part.index = platform::opaque(part.index), part.threads = platform::opaque(part.threads);
  const detail::Cut cut(dst, src, bytes);
  detail::copy_body<S, Unroll>(dst + cut.head, src + cut.head, cut.body, cut.unit, part);
  detail::copy_edges(dst, src, cut, part);
}

// The rest of a push that does not go in bulk.
template <Scope S, Engine E, int Unroll, int Stages, int StageBytes>
TSN_DEVICE void copy_pushed(char* peer, const char* src, uint64_t bytes, void* ring, uint32_t done) {
  if constexpr (kMayPushInBulk<S, E, Stages>)
    copy<S, Engine::ldst, Unroll, 0, 0>(peer, src, bytes, nullptr, Direction::push, done);
  else copy<S, E, Unroll, Stages, StageBytes>(peer, src, bytes, ring, Direction::push, done);
}

} // namespace tsn
