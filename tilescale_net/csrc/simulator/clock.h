// Vector clocks: a thread's knowledge of other threads and ranks.
//
// A clock holds an epoch for each known key. Kinds of keys:
//   all      everything that the rank has done up to this epoch, its transfers included
//   ended    the same except its puts, which the end of a kernel does not complete
//   steps    a warp's own loads and stores, and the calls that it has made; of all lanes, or of one, as the word states
//   fenced   the warp's puts to a PE up to this epoch come before a fence for it
//   done     the same puts are complete, for all that know this: after a quiet, or a fence before a signal to that PE.
//            Of stores through remote views both are known lane by lane, or of all lanes, as the word states.
//   carried  the warp's put_signals to a PE by one signal word, up to this epoch, are complete
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn::sim {

enum class Part : uint64_t { all, steps, fenced, done, carried, ended };

using Key = uint64_t;
constexpr int kMaxRanks = 64;
constexpr uint32_t kMaxWarps = 1 << 16;
constexpr uint64_t kMaxWords = 1ull << 33;

// `word`: the signal word's index in its heap.
constexpr Key clock_key(Part part, int rank, uint32_t warp = 0, int pe = 0, uint64_t word = 0) {
  return static_cast<uint64_t>(part) << 61 | static_cast<uint64_t>(rank) << 55 | static_cast<uint64_t>(warp) << 39 |
         static_cast<uint64_t>(pe) << 33 | word;
}
constexpr uint64_t kAllLanes = 33;  // after those of a warp, from 1 on
constexpr unsigned kEveryLane = 32; // instead of a lane: the warp as a whole
constexpr Key steps_key(int rank, uint32_t warp, unsigned lane = kEveryLane) {
  return clock_key(Part::steps, rank, warp, 0, lane < kEveryLane ? lane + 1 : 0);
}
constexpr uint64_t word_of(Key key) { return key & (kMaxWords - 1); }
constexpr Part part_of(Key key) { return static_cast<Part>(key >> 61); }
constexpr int rank_of(Key key) { return static_cast<int>(key >> 55 & 63); }
constexpr uint32_t warp_of(Key key) { return static_cast<uint32_t>(key >> 39 & 0xffff); }
constexpr int pe_of(Key key) { return static_cast<int>(key >> 33 & 63); }

using Clock = std::vector<std::pair<Key, uint32_t>>; // sorted by key
using Known = std::shared_ptr<const Clock>;

Known nothing_known();
uint32_t epoch_of(const Known& known, Key key); // 0: none
// The epoch up to which all of the rank's work is known, except its puts.
uint32_t rank_known(const Known& known, int rank);
Known join(const Known& a, const Known& b);
// The same for a few entries, in place if no other owner holds the clock. Returns whether more is known of a whole
// warp's steps: then entries of its lanes may have become superfluous.
bool join_in_place(Known& known, const Clock& entries);
// The epoch up to which the lane's work is known.
uint32_t steps_known(const Known& known, int rank, uint32_t warp, unsigned lane);
// Without entries of lanes that are known of their whole warp.
Known without_lanes(const Known& known);
// Whether `a` covers `b`.
bool covers(const Known& a, const Known& b);

} // namespace tsn::sim
