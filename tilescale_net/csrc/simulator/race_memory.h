// What the ranks of a host share to find races between them: the last accesses to each heap, the transfers, and what
// the sender of each signal knew.
//
// Every rank has a page of its own, which the others map. Into it write the rank itself, and peers that put there, get
// from there, or signal. All that is kept is bounded: what was overwritten counts as ordered.
#pragma once

#include "clock.h"
#include "tilescale_net/device/host/simulator_api.h"

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace tsn {

// An address as a number, to compute with.
inline uint64_t address_of(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

} // namespace tsn

namespace tsn::sim {

// The last access to 4 bytes of a heap: rank (6 bits), kind (2 bits); then warp (16 bits), whether it was a signal (1
// bit), lane (6 bits), whether it was atomic (1 bit), epoch (32 bits) of an access, or the number of a transfer. 0:
// none.
using Stamp = uint64_t;
enum class Touch : uint64_t { access, put, source, get };

constexpr Stamp access_stamp(int rank, uint32_t warp, unsigned lane, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(lane) << 25 | static_cast<uint64_t>(warp) << 8 |
         static_cast<uint64_t>(rank);
}
// kNarrowStamp: of an atomic access, which a lane makes: its scope is not the system's.
constexpr Stamp kSignalStamp = 1ull << 24, kNarrowStamp = 1ull << 30, kAtomicStamp = 1ull << 31;
constexpr unsigned lane_of_access(Stamp s) { return static_cast<unsigned>(s >> 25 & (s & kAtomicStamp ? 31 : 63)); }
constexpr Stamp transfer_stamp(int rank, Touch touch, uint64_t number) {
  return number << 8 | static_cast<uint64_t>(touch) << 6 | static_cast<uint64_t>(rank);
}
constexpr bool is_signal(Stamp s) { return (s >> 6 & 3) == static_cast<uint64_t>(Touch::access) && s & kSignalStamp; }
constexpr int rank_of_stamp(Stamp s) { return static_cast<int>(s & 63); }
constexpr Touch touch_of(Stamp s) { return static_cast<Touch>(s >> 6 & 3); }

constexpr uint64_t kNoWord = ~0ull;  // of transfers that carry no signal
constexpr uint64_t kAnyWord = ~1ull; // of messages that any wait may have seen

struct Transfer {
  uint64_t number;
  uint64_t word; // that its signal changes, or kNoWord
  uint32_t warp, epoch, thread, block;
  uint32_t warps; // that make it together, from `warp` on
  uint32_t lane;  // 1 to 32 of what a thread does, such as a store through a remote view; else 0
  int32_t pe;
  uint32_t site;
  // Of a put whose stamp has replaced that of another one, which reads the same source or more and is not known to be
  // done: the number of that one, or 0; and how many have been replaced, one after the other.
  uint64_t replaced;
  uint32_t n_replaced;
  bool atomic; // an atomic operation without a result
};
constexpr uint32_t kMostReplaced = 16; // puts to so many PEs from one source

// A signal, when it may have been seen. What its sender knew is in the sender's `known`, from `at` on.
struct Message {
  uint64_t turn; // its place among all, plus 1, when it is complete
  uint64_t word;
  uint64_t at;
  uint32_t entries;
  int32_t rank;
  uint32_t warp, epoch;
  uint32_t lane, floor; // that sent it, kEveryLane for the warp; up to which epoch it held for all lanes
  uint32_t carried;     // the epoch of the put_signal that it belongs to, or 0
  int32_t pe;
  uint64_t value;
  bool add;        // value is added to the word; else it is set
  bool everything; // the sender was not followed: it may have known all
  bool left;       // in a word that is no signal: by an atomic operation or a store with an order
};

// What a wait shows of its word: that it has come to `value`, or, where `any`, nothing.
struct Seen {
  bool any;
  bool exactly; // the word was that value; else at least that
  int64_t value;
};

struct RaceMemory;

// The signals to a word that have come, and what they carried.
class SignalHistory {
public:
  void add(const Message& message, const Known& sent);
  void learn(const Known& known) { all_ = join(all_, known), whole_ = false; }
  // What a thread that has seen the word knows for certain, whichever of the signals came first. `now`: the word
  // itself, read before the latest signals were. `before`: what it has known before.
  Known guaranteed(const Seen& seen, int64_t now, const Known& before) const;
  // The same for a word that one rank sets: how many signals have come then. 0: unknown.
  size_t reached(const Seen& seen, const Known& before) const;
  // Whether a signal that may come before a wait for `value` exactly takes the word beyond it: one whose sender does
  // not know that the wait of this rank, warp and lane is over. `at`: what `reached` returned. `now`: see above.
  bool passes(int64_t value, size_t at, int64_t now, int rank, uint32_t warp, unsigned lane, uint32_t epoch) const;
  // Drops what all later launches know without it. False: nothing is left.
  bool forget(const RaceMemory& memory);

private:
  struct Step {
    int rank;
    uint32_t warp, lane, epoch;
    int64_t value;
    Known known;
  };
  // Whether a step comes after another one in every schedule.
  static bool follows(const Step& step, const Step& before);

  Known all_ = nothing_known();
  std::vector<Step> steps_;
  bool whole_ = true; // no step is missing
  bool adds_ = false, sets_ = false;
};

// The messages to a rank, as far as this one has read them: its own ones, and those to others whose words it loads.
struct Inbox {
  uint64_t read = 0;
  std::unordered_map<uint64_t, SignalHistory> words; // words of the heap, by index
  Known any = nothing_known();                       // to a thread that has seen any
};

struct Entry {
  Key key;
  uint64_t epoch;
};

constexpr uint64_t kTransfers = 1 << 16, kMessages = 1 << 16, kEntries = 1 << 20;
constexpr uint64_t kMeetings = 8; // of hosts; the last ones are kept
constexpr uint32_t kSites = 2048;
using Site = uint16_t; // of a plain access: its number in the rank's names, plus 1; 0: unknown

struct Page {
  uint32_t latest;   // epoch of anything that the rank has done
  uint32_t finished; // the last one of launches that have ended
  uint32_t warps_per_block;
  uint32_t sites;
  uint64_t meetings;               // of the hosts of all ranks, to which this rank has come
  uint32_t finished_at[kMeetings]; // what it had finished when it came
  // Rounds since all threads began to wait for words of the heap, with nothing of theirs on its way; and where one of
  // them waits.
  uint64_t stalled, stalled_word;
  uint32_t stalled_site;
  uint64_t transfers, messages, entries; // so far; the last ones are kept
  char names[kSites][96];                // of primitives with their lines, and lines of plain accesses
  Transfer transfer[kTransfers];
  Message message[kMessages];
  Entry known[kEntries];
};

uint64_t race_memory_bytes(uint64_t heap_bytes);

// The last stores to a heap, or the last loads: a stamp for each 4 bytes, and where some of these were accessed without
// the others, one for each byte. With the sites of those that are plain accesses.
struct Shadow : HeapAccesses {
  // f(stamp, site, begin, end) for all parts of a range that have a stamp; where it returns true, and `mark` is not 0,
  // the mark takes the stamp's place.
  template <typename F>
  void each(uint64_t offset, uint64_t size, Stamp mark, Site site, F f) const;

private:
  void part(uint64_t word) const; // its bytes have stamps of their own from now on
};

// Memory of the heap that host code may write through an array, unseen.
struct Alias {
  std::vector<std::pair<uint64_t, uint64_t>> runs; // offsets and bytes
  uint64_t element;                                // bytes of one, which are written together
  std::vector<char> bytes;                         // what was there when the host went on
  std::vector<std::string> lines;                  // where the array was made, where that is known
};

// A rank and its heap: what this process keeps of them from launch to launch.
struct RaceMemory {
  int me = 0;
  uint64_t base = 0, bytes = 0;
  std::vector<Page*> pages;                                   // of all ranks
  std::vector<uint64_t> heaps;                                // where they are mapped; 0: they are not
  std::vector<uint32_t> ended;                                // what each had finished when the launch was requested
  std::vector<Inbox> inboxes;                                 // of all ranks
  Known learnt = nothing_known();                             // to launches of this rank after the ended ones
  std::map<std::pair<uint32_t, int>, uint32_t> put_epochs;    // by warp and PE: of the latest put of ended launches
  std::map<std::pair<uint32_t, int>, uint32_t> thread_epochs; // the same of what single threads put
  uint32_t flushed = 0;                                       // all of its transfers up to this epoch are done
  std::map<std::pair<int, uint64_t>, Known> fetched;
  std::unordered_map<const Clock*, std::pair<Known, uint64_t>> published;
  // By word_key: the stamps of an atomic store of another rank and of this rank's latest atomic load that has found it.
  std::unordered_map<uint64_t, std::pair<Stamp, Stamp>> observed;
  std::map<std::string, uint32_t> sites;
  std::map<uint64_t, Alias> aliases;     // by number
  std::vector<uint64_t> alias_transfers; // of each rank, when the bytes of the aliases were taken
  uint32_t alias_epoch = 0;              // the latest of this process then

  int ranks() const { return static_cast<int>(pages.size()); }
  static uint64_t word_key(int rank, uint64_t offset) { return static_cast<uint64_t>(rank) << 48 | offset / 4; }
  Page& own() const { return *pages[static_cast<size_t>(me)]; }
  Shadow stores(int rank) const;
  Shadow loads(int rank) const;
  uint64_t offset(const void* p) const { return reinterpret_cast<uint64_t>(p) - base; }
  bool holds(const void* p) const { return offset(p) < bytes; }
  int owner(const void* p) const; // the rank in whose heap the address lies; -1: none
  // Where the heaps of others lie, from the first to the end of the last.
  void peer_range(uint64_t* begin, uint64_t* size) const;

  // The last epochs of all other ranks, and that this one's transfers are done: a thread that knows this knows
  // everything.
  Known everything() const;
  Key all_done() const { return clock_key(Part::carried, me, kMaxWarps - 1, kMaxRanks - 1, kMaxWords - 1); }
  uint64_t publish(const Known& known);
  uint32_t site(const std::string& name);
  bool find(int rank, uint64_t number, Transfer* out) const;
  bool is_atomic(Stamp stamp) const;
  void send(int pe, Message message);
  // A thread that is not followed has changed the word, where it lies in another rank's heap.
  void leave_unknown(const void* word);
  // What this rank has read of the messages to that one, brought up to date.
  Inbox& receive(int rank, const Known& own_signals);
  void forget_finished();
  // Whether all ranks wait for each other for good, as this one sees it while it waits; then which others wait where.
  std::string deadlock() const;

  // What is left of it for a thread that knows all that had ended.
  Known beyond_ended(const Known& known) const;

private:
  Known fetch(const Message& m);
};

// `pages`: of all ranks; empty where one of them cannot be followed. `heaps`: 0 for unmapped ones.
void attach_race_memory(int me, uint64_t base, uint64_t bytes, const std::vector<uint64_t>& pages,
                        const std::vector<uint64_t>& heaps);
void detach_race_memory(uint64_t base);
// What follows comes after what other ranks have finished by now, and all that this rank has put counts as done: what
// the others know of it does not change here.
void note_ended_launches(uint64_t base);
void note_ended_launches_of_all(); // of all heaps
// The same for hosts that meet by calls of which each rank knows the number: what others had finished when they came.
void host_comes(uint64_t base);
void host_has_met(uint64_t base);
RaceMemory* race_memory(uint64_t base); // null: none
uint32_t latest_epoch();                // of this process
uint32_t take_epoch();                  // one that is later than all of this process
void give_epoch(uint32_t last);

template <typename F>
void Shadow::each(uint64_t offset, uint64_t size, Stamp mark, Site site, F f) const {
  const uint64_t end = offset + size;
  const auto look = [&](Stamp* stamps, Site* sites, uint64_t at, uint64_t begin, uint64_t to) {
    const bool leaves = f(__atomic_load_n(stamps + at, __ATOMIC_RELAXED), sites[at], begin, to) && mark;
    if (leaves) __atomic_store_n(stamps + at, mark, __ATOMIC_RELAXED), sites[at] = site;
    return leaves;
  };
  for (uint64_t i = offset / 4; i * 4 < end; ++i) {
    const uint64_t first = i * 4 < offset ? offset : i * 4, last = i * 4 + 4 < end ? i * 4 + 4 : end;
    const bool whole = last - first == 4;
    if (__atomic_load_n(words + i, __ATOMIC_ACQUIRE) < kParting) {
      if (whole || !mark) {
        look(words, word_sites, i, first, last);
        continue;
      }
      part(i);
    }
    bool all = whole;
    for (uint64_t at = first; at < last; ++at) all = look(bytes, byte_sites, at, at, at + 1) && all;
    if (all) word_sites[i] = site, __atomic_store_n(words + i, mark, __ATOMIC_RELEASE);
  }
}

} // namespace tsn::sim
