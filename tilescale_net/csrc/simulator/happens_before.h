// The order of a job's accesses that holds in every schedule, by vector clocks of warps.
//
// Lanes of a warp know of each other the state of their last warp synchronisation; if ranks are not followed, a warp
// counts as one. Barriers, and accesses to words with an order, propagate a warp's knowledge of the others, and a
// signal its sender's knowledge to the threads that have seen it. A transfer is an actor of its own: a put reads its
// source and writes its target at any time until a thread knows that it is done. The memory model then requires:
//   - two accesses of the same bytes of a heap, of which one is a transfer and one writes, are ordered;
//   - a put is visible to no thread without a later fence or quiet: one that runs beside it instead is an error;
//   - a signal word is either set or added to, and by signals only.
// If a thread's knowledge is uncertain (after an atomic operation on a heap, from a rank that is not followed), it
// may have learnt everything. So reported accesses are unordered; the reverse is not promised.
#pragma once

#include "clock.h"
#include "race_memory.h"
#include "tilescale_net/device/host/simulator_api.h"
#include "tilescale_net/device/types.h"

namespace tsn::sim {

// The acting thread, and its place in the program.
struct Actor {
  uint32_t warp, block, thread;
  int line; // of the primitive that it calls, or of its statement

  unsigned lane() const { return thread % 32; }
};

// A load of a thread that polls.
struct Polled {
  const void* address;
  uint64_t bytes;
  Ordering ordering;
  int64_t found;
  // The word now; the found value if the word has moved on to one that does not end the loop.
  int64_t value(const Ends& ends) const;
};

constexpr uint32_t kHostWarp = kMaxWarps - 1; // the host counts as one more warp
constexpr size_t kMaxCarried = 1 << 14;       // entries of a clock that a signal carries

// An entry of a launch's lines or names, and the same in brackets behind a text; "" if unknown.
inline std::string entry_at(const std::vector<std::string>& table, int line) {
  return line >= 0 && static_cast<size_t>(line) < table.size() ? table[line] : "";
}
inline std::string in_brackets(const std::vector<std::string>& table, int line) {
  const std::string entry = entry_at(table, line);
  return entry.empty() ? "" : " (" + entry + ")";
}

// The author's name: put_block, fence, …
std::string primitive_name(uint32_t operation, uint32_t scope);
// The name that the author typed at a line, if known.
std::string primitive_name(uint32_t operation, uint32_t scope, const std::vector<std::string>& names, int line);

class HappensBefore {
public:
  // `memory`: null for an unknown heap.
  // `names`: of the primitives at these lines.
  HappensBefore(unsigned warps_per_block, const std::vector<std::string>& lines, const std::vector<std::string>& names,
                RaceMemory* memory, bool follows_ranks);
  ~HappensBefore();

  // Warps have met: each knows all that any of them knew.
  void meet(const std::vector<uint32_t>& warps);
  // Lanes of a warp have met in a synchronisation; `all`: every one that has not ended.
  void lanes_meet(uint32_t warp, uint32_t mask, bool all);
  // They have met for a call. A put of a block is complete when all of its warps have reached its end.
  void meets_for(const std::vector<uint32_t>& warps, const Call& call, int line);
  // A load, a store or an atomic operation, with or without an order: records its order, and returns an error or
  // nothing. `bytes`: 0 if another call compares it.
  // `late`: it may take effect later. `polls`: `polled` reports its result.
  std::string word(const Actor& actor, const void* address, uint64_t bytes, WordAccess access, Ordering ordering,
                   Written written, bool late, bool polls);
  // The load of a thread that polls has ended the loop; `ends`: the values that do.
  void polled(const Actor& actor, const Polled& load, Ends ends);
  void fenced(uint32_t warp, unsigned lane, MemScope scope);
  // The lane's last flush has this ticket; or a flush has ended.
  void flushed(uint32_t warp, unsigned lane, uint64_t ticket, bool ended);
  // `line`: of the wait.
  void waited(uint32_t warp, unsigned lane, int line, const uint64_t* signal, const Seen& seen);
  // A call begins, in a warp that acts for its scope; `done`: its result is used, so it is complete when it returns.
  // Returns its error, or nothing.
  std::string begin(const Actor& actor, const Call& call, bool done);
  // Contents of this rank's signal to the PE; `put_epoch`: of its put_signal, or 0.
  Message message(uint32_t warp, unsigned lane, int pe, const uint64_t* signal, bool add, uint32_t put_epoch);
  // The knowledge that an executed atomic operation leaves in a word of another rank; false: none.
  bool leaves(uint32_t warp, unsigned lane, const void* word, Written written, Message* out);
  // A plain access to this rank's heap. `judge`: return its error, which costs more.
  std::string accessed(const Actor& actor, const void* address, uint64_t bytes, bool store, const char* name,
                       bool judge, Thread& view);
  // The same through a remote view, for an address in another rank's heap. A store is a put.
  std::string viewed(const Actor& actor, const void* address, uint64_t bytes, bool store, const char* name);
  // The host accesses this rank's heap, between launches.
  std::string host(uint64_t offset, uint64_t bytes, bool store, const std::string& name);
  // Whether the host alone can have written bytes that differ from the saved ones of the aliases.
  bool written_by_host(uint64_t offset);
  // Unordered accesses there are not reported.
  void benign_race(const void* address, uint64_t bytes);
  // Accesses not followed for lack of room.
  void add_gaps(std::set<std::string>& gaps) const;
  // An error of the launch as a whole, or nothing.
  std::string end() const;

  uint32_t epoch(uint32_t warp) { return at(warp).epoch; }
  uint32_t first_epoch() const { return first_epoch_; }
  // The epoch up to which work of a lane of `by` comes before the lane.
  uint32_t known_steps(uint32_t warp, unsigned lane, uint32_t by, unsigned by_lane);
  bool in_heap(const void* p) const { return memory_ && memory_->holds(p); }
  // The stamp of the warp's own accesses from now on in the heap's shadow.
  Stamp stamp(uint32_t warp, unsigned lane) {
    return memory_ ? access_stamp(memory_->me, warp, lane, at(warp).epoch) : 0;
  }
  // The latest transfer of this rank, 0: none is recorded; and by the last 31 bits of its number, whether its source
  // may be written again, and its thread.
  uint64_t latest_transfer() const { return follows_ranks_ ? memory_->own().transfers : 0; }
  bool source_is_free(uint32_t number, uint32_t warp, unsigned lane);
  std::string thread_of_transfer(uint32_t number) const;
  // A put's stamp has replaced another put's, which has read the same bytes.
  void replaces(uint64_t put, uint32_t before, uint32_t warp, unsigned lane);
  std::string typed_name(const Call& call, int line) const {
    return primitive_name(call.operation, call.scope, names_, line);
  }
  bool follows_ranks() const { return follows_ranks_; }
  const Site* sites() const { return sites_.data(); } // of the kernel's lines, from -1 on

private:
  struct Sent { // the knowledge of `from` that a signal to a PE, or a word there, carries
    Known from, sent;
  };
  struct State {
    uint32_t epoch = 0, floor = 0;  // all lanes know all lanes' work up to the floor
    Known known;                    // to all lanes
    std::unique_ptr<Known[]> lanes; // to each, null: no more than to all
    std::map<int, Sent> sent, left;
  };
  struct Event {
    uint32_t warp, epoch;
    int pe, line;
    uint32_t operation, scope;
    unsigned lane = kEveryLane; // that makes it
  };
  struct Put {
    Event event;
    bool beside = false; // a fence runs beside it
    Event fence{};
  };
  struct Exact { // a wait for a value exactly
    const uint64_t* signal;
    Event event;
    int64_t value;
    size_t reached; // see SignalHistory
  };
  struct Use { // of a signal word
    Event event;
    bool add;
  };
  struct Found { // an access not ordered with the current one
    Stamp stamp = 0;
    bool stores = false;
    uint64_t begin = 0, end = 0; // of the bytes that both touch, in the heap
    Site site = 0;               // of a plain access
    bool narrow = false;         // both are atomic, without a common scope
  };

  struct Left { // knowledge that threads have left in a word
    Known known = nothing_known();
    Known latest; // the latest thread's knowledge besides its own work: most know the same
    void learn(const Known& known, const Clock& own);
  };
  struct Word {                        // knowledge that releasing threads left in it
    Left of_rank;                      // at the scope of the GPU or the system
    std::map<uint32_t, Left> of_block; // by block, at any scope
    SignalHistory steps;               // of the rank
    // Possible knowledge of a thread of the block that acquires it.
    Known acquired(uint32_t block, MemScope scope) const;
    // `own`: the thread's own work.
    void learn(const Known& known, const Clock& own, uint32_t block, MemScope scope);
  };
  struct Joined { // two clocks that were joined
    Known a, b, both;
  };
  struct Beside { // fences beside relaxed accesses of a thread, by scope
    std::array<Known, 3> found{nothing_known(), nothing_known(), nothing_known()};  // in words, if a fence follows
    std::array<Known, 3> fenced{nothing_known(), nothing_known(), nothing_known()}; // by the latest
  };

  // The change of memory by an access, if any: of this rank's own, or another rank's by these means.
  enum class Change { none, own, put, store, signal };

  State& at(uint32_t warp);
  // Ends the warp's epoch; returns its knowledge from now on.
  void turn(State& state, Known known);
  // A lane's own knowledge.
  const Known& known_to(const State& state, unsigned lane) const;
  Known with_own(uint32_t warp, const State& state, unsigned lane) const;
  Clock own_steps(uint32_t warp, const State& state, unsigned lane) const;
  // `join`, for threads that learn the same one after another.
  Known join_again(const Known& a, const Known& b);
  // Ends the warp's epoch; returns the lane's knowledge from now on.
  void learn(State& state, unsigned lane, Known known);
  uint64_t thread_key(uint32_t warp, unsigned lane) const { return warp * 64ull + (lanes_ ? lane : kEveryLane); }
  // `shared`: with other ranks; `owner`: that other rank in whose heap the word lies, or -1.
  void release(uint32_t warp, unsigned lane, const void* address, Ordering ordering, bool shared, int owner,
               Written written, bool late);
  // `acquired(scope)`: the knowledge that the word propagates at this scope.
  template <typename F>
  Known acquired_as(uint32_t warp, unsigned lane, Ordering ordering, F acquired);
  Message left_in(uint32_t warp, unsigned lane, int owner, const void* address, const Known& known, Written written,
                  bool late);
  // Possible new knowledge of a thread that reads a word of a rank's heap without a wait.
  Known acquired_by_word(int rank, uint64_t offset);
  // The same for a thread that polls.
  Known polled_by_word(int rank, const Polled& load, const Ends& ends, const Known& before);
  // An atomic access to a word of a rank's heap, compared with others.
  std::string compared(const Actor& actor, int rank, uint64_t offset, uint64_t bytes, WordAccess access,
                       MemScope scope);
  bool comes_before(const Event& event, uint32_t warp, unsigned lane);
  Put made_put(const Event& event);
  void add_put(const Put& put);
  void cover(const Event& event);
  // Additional knowledge of the warp after a fence, or a quiet (Part::done).
  Known completed(const Event& event, Part part);
  // A thread puts by itself.
  void note_thread_put(const Event& event);
  // The epoch up to which single lanes' puts to the PE come before a fence.
  uint32_t stores_before(const Event& event, int pe);
  const Known& sent_by(State& state, unsigned lane, int pe);
  // The puts to the PE that are fenced in `known`, as done ones.
  Clock fenced_puts(const Known& known, int pe) const;
  std::string use(const Event& event, const Call& call);
  std::string stored_plainly(const Event& event, const uint64_t* word) const;
  std::string passed() const;
  void enter_barrier(const Actor& actor, unsigned lane);
  std::string transfer(const Actor& actor, const Event& event, const Call& call, uint32_t warps);
  uint64_t whole_number(uint32_t number) const;
  uint64_t record(const Actor& actor, const Event& event, uint32_t warps, uint64_t word, const std::string& name,
                  uint32_t lane = 0);
  // A signal changes its word: meanwhile only waits may read it.
  std::string changed_word(const Actor& actor, const Event& event, const Call& call);
  std::string put(const Actor& actor, const Event& event, const Call& call, Stamp source, Stamp target);
  std::string atomic(const Actor& actor, const Event& event, const Call& call, bool done);
  std::string got(const Actor& actor, const Event& event, const Call& call, Stamp source);
  // The stamp of a put's source has taken the place of another one, in all of these bytes.
  void note_replaced(Stamp source, Stamp before);
  bool all_held(const void* p, int64_t pitch, const Call& call) const;
  // Whether a stamp's access comes before the lane.
  bool comes_before(Stamp stamp, uint32_t warp, unsigned lane);
  // The first of a stamp's accesses that does not come before the lane; 0: all do.
  Stamp unordered(Stamp stamp, uint32_t warp, unsigned lane);
  // The same at a place of a rank's heap: what an atomic store left there comes before a lane that comes after an
  // atomic load which has found it.
  Stamp unordered(Stamp stamp, int rank, uint64_t offset, uint32_t warp, unsigned lane);
  bool is_benign(uint64_t begin, uint64_t end) const;
  // Checks the stamps of a range of a rank's heap, and leaves `mark` there unless it is 0. `keep_unordered`: not over
  // an unordered access, such as a put that still reads its source, which a later store should find. `own`: the
  // access's stamp, if it is atomic or a signal and leaves none.
  void look(int rank, bool stores, uint64_t offset, uint64_t bytes, const Actor& actor, Stamp mark, Found* found,
            bool keep_unordered = false, Stamp own = 0);
  std::string race(const Actor& actor, const std::string& what, const Found& found, int owner, Change change);
  Site site_of(const Actor& actor) const;
  // Text of an acting thread of this rank, and of a plain access.
  std::string who(const Actor& actor) const;
  std::string plain_access(const Actor& actor, bool store, const char* name) const;
  std::string name_of(const Found& found) const;
  std::string advice(const Actor& actor, const Found& found, int owner, Change change);
  std::string name(const Event& event) const;
  std::string line(int number) const { return in_brackets(lines_, number); }
  std::string place(uint32_t warp) const;

  unsigned warps_per_block_;
  const std::vector<std::string>&lines_, &names_;
  RaceMemory* memory_;
  std::vector<Site> sites_;
  bool follows_ranks_; // else only accesses of this rank's warps are compared, and a wait may follow everything
                       // signalled
  Known start_;        // all warps' initial knowledge
  uint32_t first_epoch_, latest_;
  std::unordered_map<uint32_t, State> warps_;
  std::unordered_map<const void*, Word> words_;
  std::array<Joined, 4> joined_; // the latest ones
  size_t next_joined_ = 0;
  std::unordered_map<uint64_t, Beside> beside_;               // by thread_key
  std::unordered_map<uint64_t, Known> flushes_;               // by ticket: knowledge of a thread after their end
  std::unordered_map<uint64_t, Known> begun_flushes_;         // by thread_key: the latest
  Known signalled_;                                           // by anyone of this rank
  std::map<std::pair<uint32_t, int>, std::vector<Put>> puts_; // by warp and PE: not covered yet
  std::map<std::pair<uint32_t, int>, uint32_t> put_epochs_;   // by warp and PE: of the latest
  std::map<std::pair<uint32_t, int>, Event> fences_;          // the latest
  std::map<std::pair<const void*, int>, Use> uses_;
  std::map<const uint64_t*, Event> waits_;
  std::vector<Exact> exact_;
  bool more_exact_ = false, more_puts_ = false;                // than are kept
  std::unordered_map<uint32_t, uint32_t> block_puts_;          // by leader: epoch of all warps, until the put begins
  bool lanes_;                                                 // lanes are distinguished
  std::map<std::pair<uint32_t, int>, uint32_t> thread_epochs_; // by warp and PE: of the latest put or view store
  std::map<std::pair<uint64_t, int>, uint32_t> lane_epochs_;   // by lane and PE: the same
  std::map<std::tuple<uint64_t, int, int>, std::pair<uint32_t, uint64_t>>
      view_stores_;                     // by lane, PE, line: epoch, number
  std::map<uint64_t, uint64_t> benign_; // ends of ranges of the heap, by their beginnings
  // By lane and PE: the epoch of the latest store through a view or atomic operation without a result.
  std::map<std::pair<uint64_t, int>, uint32_t> direct_epochs_;
  // The current access comes after this rank's fenced puts, done or not.
  bool behind_fences_ = false;
};

// The host of a rank loads from or stores to its heap, at these addresses and sizes. Returns an error, or nothing.
// `line`: of its program, or empty.
std::string host_access(uint64_t base, const std::vector<std::pair<uint64_t, uint64_t>>& runs, bool store,
                        const std::string& name, const std::string& line);
// Host code may write these addresses and sizes unseen from now on, elements of `element` bytes: the number of the
// alias. `line`: of its creation.
uint64_t add_alias(uint64_t base, const std::vector<std::pair<uint64_t, uint64_t>>& runs, uint64_t element,
                   const std::string& line);
void drop_alias(uint64_t base, uint64_t number);
// The host continues after a possible change of its heap: saves the contents, against which its writes show.
// `still_changing`: nothing shows until the next time.
void take_aliases(uint64_t base, bool still_changing);
// The host's writes through aliases since then, as `host_access`.
std::string alias_access(uint64_t base, const std::string& name);

} // namespace tsn::sim
