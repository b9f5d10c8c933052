// The bulk engine for pushes that fit the ring: all parts are on their way before the target is known, and none waits
// for room.
#pragma once

#include "copy.h"

namespace tsn {

// From which size, for the automatic engine; measured on two H200.
constexpr uint64_t kOnceFrom = 32 * 1024;

// Loads of a whole copy into the ring, and its stores. By one thread.
template <int Stages, int StageBytes>
struct BulkOnce {
  static constexpr uint64_t kMost = uint64_t(Stages) * StageBytes;

  uint64_t* loaded;
  char* ring;
  uint32_t bytes, part; // all stages take as much, but for the last ones

  // `n` is a multiple of 16 and at most kMost, `src` aligned to 16.
  TSN_DEVICE BulkOnce(const char* src, uint32_t n, char* r) : ring(r), bytes(n) {
    part = (n + 16 * Stages - 1) / (16 * Stages) * 16;
    loaded = platform::stage_barriers<Stages>();
    TSN_UNROLL
    for (int s = 0; s < Stages; s++) platform::barrier_init(loaded + s);
    platform::barrier_init_done();
    platform::bulk_fence(); // the ring, and what this thread wrote to the source, were written by ordinary accesses
    each([&](int s, uint32_t at, uint32_t size) {
      platform::barrier_expect(loaded + s, size);
      platform::bulk_load(ring + at, src + at, size, loaded + s);
    });
  }

  // On return all bytes are stored, as if by ordinary stores of this thread, and the ring is free.
  TSN_DEVICE void store(char* dst) {
    each([&](int s, uint32_t at, uint32_t size) {
      platform::barrier_wait(loaded + s, 0);
      platform::bulk_store(dst + at, ring + at, size);
      platform::bulk_commit();
    });
    platform::bulk_wait<0>();
    retire();
  }

  // Frees the ring without a store.
  TSN_DEVICE void cancel() {
    each([&](int s, uint32_t, uint32_t) { platform::barrier_wait(loaded + s, 0); });
    retire();
  }

private:
  template <class F>
  TSN_DEVICE void each(F f) const {
    TSN_UNROLL
    for (int s = 0; s < Stages; s++) {
      const uint32_t at = uint32_t(s) * part;
      if (at < bytes) f(s, at, bytes - at < part ? bytes - at : part);
    }
  }
  TSN_DEVICE void retire() const {
    TSN_UNROLL
    for (int s = 0; s < Stages; s++) platform::barrier_retire(loaded + s);
  }
};

// Whether pushes may take this way. (Where blocks are large, the beginning of a copy takes most of what would fit.)
template <Scope S, Engine E, int Unroll, int Stages>
constexpr bool kMayGoOnce = S == Scope::block && E != Engine::ldst && Unroll > kPushRows<S>&& Stages > 1 &&
                            platform::kHasBulk && !platform::kDefersRemoteWrites;

// Before the barrier of a push: what a thread wrote to the source must be there for the bulk copies that the leader may
// issue. The CUDA programming guide asks this fence of whoever wrote, not of who copies.
template <Scope S, Engine E, int Unroll, int Stages>
TSN_DEVICE void publish_to_bulk(int64_t bytes) {
  if constexpr (S == Scope::block && E != Engine::ldst && Stages > 1 && platform::kHasBulk) {
    constexpr uint64_t kLeast = E == Engine::bulk ? 16 : kMayGoOnce<S, E, Unroll, Stages> ? kOnceFrom : kBulkPushFrom;
    if (TSN_UNLIKELY(uint64_t(bytes) >= kLeast)) platform::bulk_publish();
  }
}

// Whether this one does.
template <Engine E, int Stages, int StageBytes>
TSN_DEVICE bool goes_once(const void* dst, const void* src, int64_t bytes, const void* ring) {
  constexpr uint64_t kLeast = E == Engine::bulk ? 16 : kOnceFrom, kMost = BulkOnce<Stages, StageBytes>::kMost;
  if (kMost < kLeast || uint64_t(bytes) - kLeast > kMost - kLeast) return false;
  return (reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | uint64_t(bytes)) % 16 == 0 &&
         ring != nullptr;
}

} // namespace tsn
