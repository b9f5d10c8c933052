// The bulk engine: a ring of stages in shared memory that one thread fills from the source and empties to the target.
#pragma once

#include "platform.h"

namespace tsn {

constexpr int kDefaultStages = 8;
constexpr int kDefaultStageBytes = 16 * 1024;

// Copies `bytes`, a multiple of 16, between 16-byte aligned places; called by one thread of the block. On return all
// bytes are stored, as if by ordinary stores of this thread, and `ring` (Stages * StageBytes bytes, 128-byte aligned)
// is free.
template <int Stages, int StageBytes>
TSN_DEVICE void copy_bulk(char* dst, const char* src, uint64_t bytes, char* ring) {
  uint64_t* loaded = platform::stage_barriers<Stages>();
  TSN_ROLLED
  for (int s = 0; s < Stages; s++) platform::barrier_init(loaded + s);
  platform::barrier_init_done();
  platform::bulk_fence(); // the source was written, and the ring used, by ordinary accesses

  uint64_t to_load = bytes, to_store = bytes;
  int fill = 0; // the stage to be loaded next
  auto load = [&] {
    const uint32_t size = to_load < StageBytes ? uint32_t(to_load) : StageBytes;
    platform::barrier_expect(loaded + fill, size);
    platform::bulk_load(ring + fill * StageBytes, src, size, loaded + fill);
    src += size;
    to_load -= size;
    fill = fill + 1 == Stages ? 0 : fill + 1;
  };
  TSN_ROLLED
  for (int s = 0; s < Stages - 1 && to_load != 0; s++) load();

  int drain = 0; // the stage to be stored next
  uint32_t parity = 0;
  while (to_store != 0) {
    const uint32_t size = to_store < StageBytes ? uint32_t(to_store) : StageBytes;
    platform::barrier_wait(loaded + drain, parity);
    platform::bulk_store(dst, ring + drain * StageBytes, size);
    platform::bulk_commit();
    dst += size;
    to_store -= size;
    if (++drain == Stages) {
      drain = 0;
      parity ^= 1;
    }
    if (to_load != 0) {
      platform::bulk_wait_read<1>(); // the stage before this one, which is filled next, has left shared memory
      load();
    }
  }
  platform::bulk_wait<0>();
  TSN_ROLLED
  for (int s = 0; s < Stages; s++) platform::barrier_retire(loaded + s);
}

} // namespace tsn
