// Which accesses of a launch are ordered, whatever the schedule: vector clocks of warps.
//
// A warp counts as one, and so do its lanes. Barriers, atomics, loads and stores with an order, and waits pass on what
// a warp knows of the others. A wait takes on everything that this rank had signalled by then, since any of it may have
// led to the signal that was seen. So what is reported as unordered is unordered; the reverse is not promised.
//
// Two rules follow from the memory model:
//   - a put is visible to nobody unless a fence or quiet comes after it: one that runs beside it instead is an error;
//   - what a put sends was written by its own scope, or before it: a write that runs beside it is an error.
#pragma once

#include "tilescale_net/device/host/simulator_api.h"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tsn {
namespace sim {

// For each warp that is known, its last epoch; sorted by warp.
using Clock = std::vector<std::pair<uint32_t, uint32_t>>;
using Known = std::shared_ptr<const Clock>;

class HappensBefore {
public:
  HappensBefore(unsigned warps_per_block, const std::vector<std::string>& lines);
  ~HappensBefore();

  // Warps have met: each knows what all of them knew.
  void meet(const std::vector<uint32_t>& warps);
  void word(uint32_t warp, const void* address, WordAccess access);
  void waited(uint32_t warp);
  // A call begins, in a warp that speaks for its scope. Returns what is wrong with it, or nothing.
  std::string begin(uint32_t warp, const Call& call, int line);
  // What is wrong with the launch as a whole, or nothing.
  std::string end() const;

  // What the heap's shadow holds for the warp's stores from now on.
  uint64_t stamp(uint32_t warp) { return static_cast<uint64_t>(warp) << 32 | at(warp).epoch; }

private:
  struct State {
    uint32_t epoch = 0;
    Known known;
    std::vector<std::pair<uint32_t, Known>> past; // what was known in each epoch that has ended, but for the oldest
  };
  struct Event {
    uint32_t warp, epoch;
    int pe, line;
    uint32_t operation, scope;
  };
  struct Put {
    Event event;
    bool beside = false; // a fence runs beside it
    Event fence{};
  };
  struct Source {
    Event event;
    const char* from;
    int64_t bytes;
    Known known;
  };
  struct Use { // of a signal word
    Event event;
    bool add;
  };

  State& at(uint32_t warp);
  // Ends the warp's epoch; what it knows from now on.
  void turn(State& state, Known known);
  static uint32_t epoch_of(const Clock* clock, uint32_t warp);
  static Known join(const Known& a, const Known& b);
  static bool covers(const Known& a, const Known& b);
  Known with_own(uint32_t warp, const State& state) const;
  bool comes_before(const Event& event, uint32_t warp);
  void add_put(const Event& event);
  void cover(const Event& event);
  std::string sends(const Event& event, const Call& call);
  std::string scan(const Source& source, bool at_end) const;
  bool knew(uint32_t warp, uint32_t epoch, const Event& event) const;
  std::string use(const Event& event, const Call& call);
  std::string stored_plainly(const Event& event, const uint64_t* word) const;
  std::string name(const Event& event) const;
  std::string place(uint32_t warp) const;

  unsigned warps_per_block_;
  const std::vector<std::string>& lines_;
  uint32_t first_epoch_;
  std::unordered_map<uint32_t, State> warps_;
  std::unordered_map<const void*, Known> words_;
  Known signalled_;                                           // by anyone of this rank
  std::map<std::pair<uint32_t, int>, std::vector<Put>> puts_; // by warp and PE: not covered yet
  std::map<std::pair<uint32_t, int>, Event> fences_;          // the latest
  std::vector<Source> sources_;
  std::map<std::pair<const void*, int>, Use> uses_;
  std::map<const uint64_t*, Event> waits_;
};

// The heap whose stores are stamped, and its shadow (8 bytes for every 4); null where there is none.
struct Shadow {
  uint64_t* stamps;
  uint64_t base, bytes;
};
Shadow shadow_of_heap();
void set_shadow(uint64_t base, uint64_t bytes);
void drop_shadow();

// The name that authors know: put_block, fence, …
std::string primitive_name(uint32_t operation, uint32_t scope);

} // namespace sim
} // namespace tsn
