// Plain accesses of one rank, compared with each other: shared memory, memory that is not symmetric, and its own heap.
//
// happens_before.h defines the order of two threads, lanes of one warp or not. Each 4 bytes have a cell, see
// LocalCell; compiled kernels check it themselves in simple cases, and call this class in others.
#pragma once

#include "happens_before.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn::sim {

// Records of the running block's shared memory.
struct SharedRange {
  uint64_t begin, bytes;
};

class LocalAccesses {
public:
  LocalAccesses(HappensBefore& order, unsigned warps_per_block, const std::vector<std::string>& lines);

  // The bytes are another block's now.
  void forget(const void* p, uint64_t bytes);
  void benign_race(const void* p, uint64_t bytes);
  // Sets the thread's id in its view. Call it when the thread runs again, and when its warp's epoch has changed.
  void enter(Thread& view, uint32_t warp);
  // Accesses not followed for lack of room.
  void add_gaps(std::set<std::string>& gaps) const;
  // An error of the access, or nothing.
  std::string accessed(Thread& view, uint32_t warp, const void* p, uint64_t bytes, LocalAccess access, const char* name,
                       const void* base, SharedRange shared);

  // A copy by the thread: the rows of its destination, or of its source, which it reads during the call (`put`: 0) or
  // until the put of this number is done.
  std::string copied(Thread& view, uint32_t warp, const Call& call, bool source, uint64_t put, SharedRange shared);

  // An error of the thread's latest store, after it was made, or nothing: it has left another value than an unordered
  // store of another thread. Call it before another thread runs.
  std::string stored();

private:
  struct Race { // an unordered pair of accesses, by their stamps and other data of LocalCell
    uint64_t own, info, other, other_info;
    LocalAccess access;
    bool stored; // by the other one
    const void* p;
    uint64_t at;      // of the 4 bytes that both touch
    const void* base; // where the variable begins
    SharedRange shared;
  };
  struct Page {
    LocalCell cells[kLocalPage / 4]{};
  };

  LocalCell& cell(uint64_t address);
  bool ordered(uint64_t stamp, Thread& view, uint32_t warp);
  bool is_benign(uint64_t address) const;
  std::string text(const Race& race) const;
  // A call's name, valid as long as the launch.
  const char* named(const Call& call, int line);
  std::string thread_of(uint64_t stamp) const;
  std::string line(unsigned site) const;

  HappensBefore& order_;
  unsigned warps_per_block_;
  const std::vector<std::string>& lines_;
  uint32_t first_epoch_;
  LocalPages shadow_{};
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_; // by address / kLocalPage
  std::vector<std::pair<uint64_t, uint64_t>> benign_;
  Race latest_{};               // a store of the running thread beside another one, or none
  std::string before_it_;       // the bytes that the other one left
  std::set<std::string> names_; // of calls
  bool more_pages_ = false;     // than are kept
};

} // namespace tsn::sim
