// Moving bytes between two mapped places: the two engines of the direct path and the choice between them.
#pragma once

#include "copy_bulk.h"
#include "first_tile.h"

namespace tsn {

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

// Head and tail, fewer than 16 bytes each; what they and the addresses are multiples of moves in one piece.
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
// Only the widest units are copied where the call stands: nvcc took as long for the four others as for all else of a
// kernel.
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

// Where the bulk engine overtakes the ldst engine, measured on two H200 over NVLink; the only place of these figures.
// A push keeps the ring's loads on their way while it looks up its target. A pull cannot, and moves more per second
// only with more memory in flight.
constexpr uint64_t kBulkPushFrom = 32 * 1024;
constexpr uint64_t kBulkPullFrom = 128 * 1024;
constexpr uint32_t kEnoughInFlight = 64 * 1024;

// What the ends of a copy must agree modulo to go in bulk. The hardware moves bytes to another place within a segment
// at half its rate or less, so `automatic` leaves those copies to the ldst engine.
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

// Whether the engine is bulk as far as the number of bytes is concerned.
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

// Before the barrier of a push: what a thread wrote to the source must be there for the bulk copies that the leader may
// issue. The CUDA programming guide requires this fence of the thread that wrote, not of the one that copies.
template <Scope S, Engine E, int Stages>
TSN_DEVICE void publish_to_bulk(int64_t bytes) {
  if constexpr (kMayBeBulk<S, E, Stages>)
    if (TSN_UNLIKELY(push_by_size<E>(uint64_t(bytes)))) platform::bulk_publish();
}

// Rows of the first tile of a push. Threads that keep no more in flight than these take a first tile of longer copies
// too, unless those go in bulk; the others would wait for the tile before they fill their many registers.
template <Scope S>
constexpr int kFirstTileRows = S == Scope::block ? 4 : 1;
template <Scope S, Engine E, int Unroll, int Stages>
constexpr bool kTileBeforeLongCopy =
    S == Scope::block && Unroll <= kFirstTileRows<S> && E != Engine::bulk && !kMayPushInBulk<S, E, Stages>;

// Copies any number of bytes between any addresses, with the engine that the caller or, for `automatic`, the table
// above chooses. By all threads of the scope, which is synchronised before; the bytes are stored when it is
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
  // Otherwise all that follows would be computed before the loop that the call is in, and kept in too many registers.
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
