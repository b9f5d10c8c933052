// The bulk engine: a ring of stages in shared memory that one thread fills from the source and empties to the target.
#pragma once

#include "platform.h"

namespace tsn {

constexpr int kDefaultStages = 8;
constexpr int kDefaultStageBytes = 16 * 1024;

// Stages that are loaded before the first one is waited for. To issue a load takes one thread about 0.1 us, so loads
// from this GPU, which arrive after 0.4 us, are spread among the stores; what comes over the link needs all it can get.
constexpr int kFirstLoadsOfPush = 3;

// Copies `bytes`, a multiple of 16, between 16-byte aligned places; called by one thread of the block. On return all
// bytes are stored, as if by ordinary stores of this thread, and `ring` (Stages * StageBytes bytes, 128-byte aligned)
// is free.
template <int Stages, int StageBytes>
TSN_DEVICE void copy_bulk(char* dst, const char* src, uint64_t bytes, char* ring, int first_loads) {
  uint64_t* loaded = platform::stage_barriers<Stages>();
  TSN_ROLLED
  for (int s = 0; s < Stages; s++) platform::barrier_init(loaded + s);
  platform::barrier_init_done();
  platform::bulk_fence(); // the ring, and what this thread wrote to the source, were written by ordinary accesses

  uint64_t to_load = bytes, to_store = bytes;
  int fill = 0;  // the stage to be loaded next
  int ahead = 0; // stages that were loaded and not yet stored; one of the ring is left for the store under way
  auto load = [&](int most) {
    TSN_ROLLED
    for (; most > 0 && to_load != 0 && ahead < Stages - 1; most--) {
      const uint32_t size = to_load < StageBytes ? uint32_t(to_load) : StageBytes;
      platform::barrier_expect(loaded + fill, size);
      platform::bulk_load(ring + fill * StageBytes, src, size, loaded + fill);
      src += size;
      to_load -= size;
      fill = fill + 1 == Stages ? 0 : fill + 1;
      ahead++;
    }
  };
  load(first_loads);

  int drain = 0; // the stage to be stored next
  uint32_t parity = 0;
  while (to_store != 0) {
    const uint32_t size = to_store < StageBytes ? uint32_t(to_store) : StageBytes;
    platform::barrier_wait(loaded + drain, parity);
    platform::bulk_store(dst, ring + drain * StageBytes, size);
    platform::bulk_commit();
    dst += size;
    to_store -= size;
    ahead--;
    if (++drain == Stages) {
      drain = 0;
      parity ^= 1;
    }
    if (to_load != 0) {
      platform::bulk_wait_read<1>(); // the stages before this one, which are filled next, have left shared memory
      load(2);
    }
  }
  platform::bulk_wait<0>();
  TSN_ROLLED
  for (int s = 0; s < Stages; s++) platform::barrier_retire(loaded + s);
}

} // namespace tsn
