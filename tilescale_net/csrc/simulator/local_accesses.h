// Plain accesses of one rank, compared with each other: shared memory, memory that is not symmetric, and its own heap.
//
// The thread is the unit: two lanes of a warp are ordered by a warp synchronisation, two warps by what happens_before.h
// says that they know. Each 4 bytes have a cell, see LocalCell; compiled kernels look at it by themselves where the
// answer is short, and ask here where it is not.
#pragma once

#include "happens_before.h"
#include "tilescale_net/device/host/simulator_api.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tsn {
namespace sim {

// What is told of shared memory of the running block.
struct SharedRange {
  uint64_t begin, bytes;
};

class LocalAccesses : public LaneOrder {
public:
  LocalAccesses(HappensBefore& order, unsigned warps_per_block, unsigned threads_per_block,
                const std::vector<std::string>& lines);

  // Lanes of a warp have met in a synchronisation; `all`: every one that has not ended.
  void lanes_meet(uint32_t warp, uint32_t mask, bool all);
  // The warps have met, with all of their lanes.
  void warps_meet(const std::vector<uint32_t>& warps);
  // A lane has found in a word what its warp had left there.
  void lane_learns(uint32_t warp, unsigned lane);
  uint32_t lane_knows(uint32_t warp, unsigned lane, unsigned other) override;
  // The bytes are another block's now.
  void forget(const void* p, uint64_t bytes);
  void benign_race(const void* p, uint64_t bytes);
  // Tells the thread's view whom it is. To be called when it runs again, and when its warp's epoch has changed.
  void enter(Thread& view, uint32_t warp);
  // What is wrong with the access, or nothing.
  std::string accessed(Thread& view, uint32_t warp, const void* p, uint64_t bytes, LocalAccess access, const char* name,
                       const void* base, SharedRange shared);

private:
  struct Lanes {
    uint32_t floor = 0;                  // all lanes know all of the warp up to this epoch
    uint32_t by_lane[32]{};              // this one does
    std::unique_ptr<uint32_t[]> of_each; // 32 x 32: what lane i knows of lane j; made when some of them meet alone
  };
  struct Page {
    LocalCell cells[kLocalPage / 4]{};
  };

  LocalCell& cell(uint64_t address);
  bool ordered(uint64_t stamp, Thread& view, uint32_t warp);
  bool is_benign(uint64_t address) const;
  std::string race(const Thread& view, const void* p, uint64_t at, LocalAccess access, const char* name,
                   const void* base, uint64_t other, uint64_t other_info, bool stored, SharedRange shared) const;
  std::string thread_of(uint64_t stamp) const;
  std::string line(unsigned site) const;

  HappensBefore& order_;
  unsigned warps_per_block_, threads_per_block_;
  const std::vector<std::string>& lines_;
  uint32_t first_epoch_;
  LocalPages shadow_{};
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_; // by address / kLocalPage
  std::unordered_map<uint32_t, Lanes> lanes_;                 // by warp
  std::vector<std::pair<uint64_t, uint64_t>> benign_;
};

} // namespace sim
} // namespace tsn
