// The bulk engine: a ring of stages in shared memory that one thread fills from the source and empties to the target.
#pragma once

#include "platform.h"

namespace tsn {

// Bulk copies are fast where their parts begin at multiples of this many bytes, at both ends.
constexpr uint32_t kSegmentBytes = 128;

// A copy of `bytes`, a multiple of 16, between 16-byte aligned places, by one thread of the block; `ring` is Stages *
// StageBytes bytes of shared memory, 128-byte aligned. After begin() its first loads are on their way, while the target
// may still be unknown; then comes either finish() or cancel(), and both leave the ring free.
//
// All stages but one are loaded ahead; the last one is left for the store in flight. Stages have constant places in
// unrolled loops: one thread does all of it, and each load and store would take it twice as long otherwise. (Several
// threads with stages of their own gain nothing: what takes time is that the multiprocessor issues one bulk copy in
// about 45 cycles, and that loads move 64 bytes a cycle.)
template <int Stages, int StageBytes>
class BulkCopy {
public:
  // `aligned_end`: source or target, at whose segments the stages shall begin.
  TSN_DEVICE BulkCopy(const char* source, uint64_t bytes, char* ring_memory, const void* aligned_end)
      : loaded(platform::stage_barriers<Stages>()), ring(ring_memory), src(source), to_load(bytes), to_store(bytes),
        skew(reinterpret_cast<uint64_t>(aligned_end) % kSegmentBytes) {
    // What fits the ring takes equal parts of all its stages, so that the first data can be sent early.
    constexpr uint32_t kUnit = kSegmentBytes * Stages;
    const uint64_t room = bytes + skew;
    part = room < uint64_t(Stages) * StageBytes ? (uint32_t(room) + kUnit - 1) / kUnit * kSegmentBytes : StageBytes;
    load_room = store_room = part - skew;
    each([&](int s) { platform::barrier_init(loaded + s); });
    platform::bulk_fence(); // the barriers and the ring were written by ordinary accesses
  }

  TSN_DEVICE void begin() {
    each([&](int s) {
      if (s < Stages - 1 || to_load <= part) load(s); // the end has no other to make room for
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

// The same where the target is known from the start. Out of line, like push_bulk(): what small copies wait for should
// stay in few registers and close together.
template <int Stages, int StageBytes>
TSN_COLD void copy_bulk(char* dst, const char* src, uint64_t bytes, char* ring) {
  platform::bulk_publish();
  BulkCopy<Stages, StageBytes> copy(src, bytes, ring, dst);
  copy.begin();
  copy.finish(dst);
}

} // namespace tsn
