// Memory that ranks of a host share to find races between them: the last accesses to each heap, the transfers, and the
// knowledge of each signal's sender.
//
// Every rank has its own page, which the others map. The rank itself writes to it, and peers that put there, get from
// there, or signal. All records are bounded: an overwritten one counts as ordered.
#pragma once

#include "clock.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn {

// An address as a number, to compute with.
inline uint64_t address_of(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

} // namespace tsn

namespace tsn::sim {

// The last access to 4 bytes of a heap: rank (6 bits), kind (2 bits); then, for an access, warp (16 bits), signal (1
// bit), lane (6 bits), atomic (1 bit), epoch (32 bits), or the number of a transfer. 0: none.
using Stamp = uint64_t;
enum class Touch : uint64_t { access, put, source, get };

constexpr Stamp access_stamp(int rank, uint32_t warp, unsigned lane, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(lane) << 25 | static_cast<uint64_t>(warp) << 8 |
         static_cast<uint64_t>(rank);
}
// kNarrowStamp: of a lane's atomic access below system scope.
constexpr Stamp kSignalStamp = 1ull << 24, kNarrowStamp = 1ull << 30, kAtomicStamp = 1ull << 31;
constexpr unsigned lane_of_access(Stamp s) { return static_cast<unsigned>(s >> 25 & (s & kAtomicStamp ? 31 : 63)); }
constexpr Stamp transfer_stamp(int rank, Touch touch, uint64_t number) {
  return number << 8 | static_cast<uint64_t>(touch) << 6 | static_cast<uint64_t>(rank);
}
constexpr bool is_signal(Stamp s) { return (s >> 6 & 3) == static_cast<uint64_t>(Touch::access) && s & kSignalStamp; }
constexpr int rank_of_stamp(Stamp s) { return static_cast<int>(s & 63); }
constexpr Touch touch_of(Stamp s) { return static_cast<Touch>(s >> 6 & 3); }

constexpr uint64_t kNoWord = ~0ull;  // of transfers that carry no signal
constexpr uint64_t kAnyWord = ~1ull; // in messages that any wait may have seen

struct Transfer {
  uint64_t number;
  uint64_t word; // that its signal changes, or kNoWord
  uint32_t warp, epoch, thread, block;
  uint32_t warps; // that make it together, from `warp` on
  uint32_t lane;  // 1 to 32 for a single thread's transfer, such as a store through a remote view; else 0
  int32_t pe;
  uint32_t site;
  // Of a put whose stamp has replaced another put's, which reads the same source or more and is not known to be done:
  // the number of that one, or 0; and the length of this chain.
  uint64_t replaced;
  uint32_t n_replaced;
  bool atomic; // an atomic operation without a result
};
constexpr uint32_t kMostReplaced = 16; // puts to several PEs from one source

// A signal that may have been seen. Its sender's knowledge is in the sender's `known`, from `at` on.
struct Message {
  uint64_t turn; // its index among all, plus 1, once complete
  uint64_t word;
  uint64_t at;
  uint32_t entries;
  int32_t rank;
  uint32_t warp, epoch;
  uint32_t lane, floor; // the sending lane, kEveryLane for the warp; the epoch up to which it held for all lanes
  uint32_t carried;     // the epoch of the put_signal that it belongs to, or of an add; or 0
  int32_t pe;
  uint64_t value;
  bool add;        // value is added to the word; else it is set
  bool everything; // the sender was not followed: it may have known everything
  bool left;       // in a word that is no signal: from an atomic operation or an ordered store
  bool known;      // `value` and `add` describe a word that is no signal
  int64_t before;  // its value before a store
  uint8_t byte;    // its place in the 8 bytes of `word`
};

// The values of a word that end a loop.
struct Ends {
  bool (*ends)(const void* condition, int64_t value);
  const void* condition;
};

// Result of a wait on its word: it has reached `value`, or, if `any`, nothing; or a value of it has ended a loop.
struct Seen {
  bool any;
  bool exactly; // the word was that value; else at least that
  int64_t value;
  const Ends* loop = nullptr;
  // Whether another value would have shown the same.
  bool by(int64_t other) const {
    return loop ? loop->ends(loop->condition, other) : exactly ? other == value : other >= value;
  }
};

struct RaceMemory;

// The arrived signals of a word, and their contents.
class SignalHistory {
public:
  struct Step {
    int rank;
    uint32_t warp, lane, epoch;
    int64_t value;
    Known known; // of the thread that made it
    Clock own;   // its own steps, unless `known` holds them
    int pe;
    uint64_t word;
    uint32_t carried; // see Message
  };
  void add(const Message& message, const Known& sent);
  void add(Step step, bool adds);
  // A store finds this value. Another one than the latest step's: an unknown store has ended the earlier steps.
  void find(int64_t value) {
    if (!steps_.empty() && steps_.back().value != value) steps_.clear();
  }
  void learn(const Known& known) { all_ = join(all_, known), lose(); }
  void lose() { whole_ = false, steps_.clear(); } // an unknown step
  bool of_signals() const { return adds_ || sets_; }
  // Certain knowledge of a thread that has seen the word, whichever of the signals came first. `now`: the word
  // itself, read before the latest signals. `before`: the thread's earlier knowledge.
  Known guaranteed(const Seen& seen, int64_t now, const Known& before) const {
    return guaranteed(seen, now, before, all_);
  }
  // `all`: the knowledge of all steps together.
  Known guaranteed(const Seen& seen, int64_t now, const Known& before, const Known& all) const;
  // The same for a word that one rank sets: the number of arrived signals. 0: unknown.
  size_t reached(const Seen& seen, const Known& before) const;
  // Whether a signal that may come before a wait for an exact `value` moves the word beyond it: its sender does not
  // know that the wait of this rank, warp and lane is over. `at`: from `reached`. `now`: see above.
  bool passes(int64_t value, size_t at, int64_t now, int rank, uint32_t warp, unsigned lane, uint32_t epoch) const;
  // Drops entries that all later launches know anyway. False: nothing is left.
  bool forget(const RaceMemory& memory);

  const Known& all() const { return all_; }

private:
  static Known of(const Step& step) {
    return step.own.empty() ? step.known : join(step.known, std::make_shared<Clock>(step.own));
  }
  // Whether a step comes after another one in every schedule.
  static bool follows(const Step& step, const Step& before);
  // Whether a step is in the word only if another one is, of any rank.
  static bool implies(const Step& step, const Step& before);

  Known all_ = nothing_known();
  std::vector<Step> steps_;
  bool whole_ = true; // no step is missing
  bool adds_ = false, sets_ = false;
};

// The messages to a rank, as far as this rank has read them: to itself, and to ranks whose words it loads.
struct Inbox {
  uint64_t read = 0;
  std::unordered_map<uint64_t, SignalHistory> words; // words of the heap, by index
  std::unordered_map<uint64_t, SignalHistory> left;  // the same of words that are no signals, by offset
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
  uint32_t finished_at[kMeetings]; // its finished work when it came
  // Rounds since all threads began to wait for words of the heap, with no operation in flight; and the place of one
  // of them.
  uint64_t stalled, stalled_word;
  uint32_t stalled_site;
  uint64_t transfers, messages, entries; // so far; the last ones are kept
  char names[kSites][96];                // of primitives with their lines, and lines of plain accesses
  Transfer transfer[kTransfers];
  Message message[kMessages];
  Entry known[kEntries];
};

uint64_t race_memory_bytes(uint64_t heap_bytes);

// The last stores to a heap, or the last loads: a stamp for each 4 bytes, and, if some of these were accessed
// separately, one for each byte. With the sites of plain accesses.
struct Shadow : HeapAccesses {
  // f(stamp, site, begin, end) for all stamped parts of a range; where it returns true, and `mark` is not 0, the mark
  // replaces the stamp.
  template <typename F>
  void each(uint64_t offset, uint64_t size, Stamp mark, Site site, F f) const;

private:
  void part(uint64_t word) const; // its bytes have stamps of their own from now on
};

// Memory of the heap that host code may write through an array, unseen.
struct Alias {
  std::vector<std::pair<uint64_t, uint64_t>> runs; // offsets and bytes
  uint64_t element;                                // bytes of one, which are written together
  std::vector<char> bytes;                         // contents when the host continued
  std::vector<std::string> lines;                  // where the array was made, if known
};

// A rank and its heap: this process's state of them from launch to launch.
struct RaceMemory {
  int me = 0;
  uint64_t base = 0, bytes = 0;
  std::vector<Page*> pages;                                   // of all ranks
  std::vector<uint64_t> heaps;                                // where they are mapped; 0: they are not
  std::vector<uint32_t> ended;                                // each rank's finished work when the launch was requested
  std::vector<Inbox> inboxes;                                 // of all ranks
  Known learnt = nothing_known();                             // to launches of this rank after the ended ones
  std::map<std::pair<uint32_t, int>, uint32_t> put_epochs;    // by warp and PE: of the latest put of ended launches
  std::map<std::pair<uint32_t, int>, uint32_t> thread_epochs; // the same for single threads' puts
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
  Page& own() const { return *pages[me]; }
  Shadow stores(int rank) const;
  Shadow loads(int rank) const;
  uint64_t offset(const void* p) const { return reinterpret_cast<uint64_t>(p) - base; }
  bool holds(const void* p) const { return offset(p) < bytes; }
  int owner(const void* p) const; // the rank in whose heap the address lies; -1: none
  // Addresses of the others' heaps, from the first to the end of the last.
  void peer_range(uint64_t* begin, uint64_t* size) const;

  // The last epochs of all other ranks, and that this rank's transfers are done: a thread that knows this knows
  // everything.
  Known everything() const;
  Key all_done() const { return clock_key(Part::carried, me, kMaxWarps - 1, kMaxRanks - 1, kMaxWords - 1); }
  uint64_t publish(const Known& known);
  uint32_t site(const std::string& name);
  bool find(int rank, uint64_t number, Transfer* out) const;
  bool is_atomic(Stamp stamp) const;
  void send(int pe, Message message);
  // A thread that is not followed has changed the word in another rank's heap.
  void leave_unknown(const void* word);
  // The messages to that rank, read up to date.
  Inbox& receive(int rank, const Known& own_signals);
  void forget_finished();
  // Whether all ranks wait for each other forever, as seen by this waiting rank; then the others' places.
  std::string deadlock() const;

  // The rest of it for a thread that knows all ended work.
  Known beyond_ended(const Known& known) const;

private:
  Known fetch(const Message& m);
};

// `pages`: of all ranks; empty if one of them cannot be followed. `heaps`: 0 for unmapped ones.
void attach_race_memory(int me, uint64_t base, uint64_t bytes, const std::vector<uint64_t>& pages,
                        const std::vector<uint64_t>& heaps);
void detach_race_memory(uint64_t base);
// Later work comes after other ranks' finished work, and this rank's puts count as done; the others' knowledge of
// them does not change here.
void note_ended_launches(uint64_t base);
void note_ended_launches_of_all(); // of all heaps
// The same for hosts that meet by numbered calls: others' finished work when they came.
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
