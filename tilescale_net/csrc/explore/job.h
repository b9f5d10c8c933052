// All ranks of a small job in this process, run one event at a time: the caller chooses the next event.
//
// A process is a thread of a kernel from its first access to a synchronisation word; the beginning of a block; or an
// operation in flight to another rank. An event of a thread is such an access, or a call that sends, fences or waits,
// with everything up to the next one, including threads that it releases at a barrier.
#pragma once

#include "history.h"
#include "tilescale_net/csrc/simulator/fiber.h"
#include "tilescale_net/csrc/simulator/grid.h"
#include "tilescale_net/csrc/simulator/remote.h"

#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace tsn::explore {

uint64_t word_at(const void* p, uint64_t bytes); // at most 8 bytes of it

struct Memory { // memory that an execution may change, with its initial contents
  uint64_t address, bytes;
  std::vector<char> first;
};

struct Rank {
  std::vector<sim::Launch> launches; // one after the other
  uint64_t heap = 0;                 // its base
  uint64_t error = 0;                // address of the first word of its record, which is set when a thread gave up
};

struct Setup {
  std::vector<Rank> ranks;
  std::vector<Memory> memory;                        // heaps and tensors, ascending, apart from each other
  std::vector<std::pair<uint64_t, uint64_t>> unseen; // begin and end of the abort page
  size_t stack_bytes = 0;
  bool races = true; // a race ends an execution
};

class Job : public sim::Scheduler {
public:
  explicit Job(Setup setup);
  ~Job() override;

  // Begins an execution. `describes`: keep a text of each event.
  void restart(bool describes);
  // Possible next processes, ascending.
  std::vector<int> enabled() const;
  void step(int process);
  // All kernels have ended, and all their operations have arrived.
  bool ended() const;
  // The block of the process: rank * 2^32 + block; -1: an operation in flight.
  int64_t block_of(int process) const;
  // A thread that runs this long without a decision ends the execution.
  void limit_event(double seconds) { event_seconds_ = seconds; }
  // Whether it has ended so.
  bool stalled() const { return stalled_; }
  struct Loop {
    int process; // -1: none
    std::string line;
  };
  // The line of a polling loop that is new in this exploration; asked after a step.
  Loop new_loop() { return std::exchange(new_loop_, {-1, ""}); }
  // Lets the thread poll without success until its loop ends, which is recorded as not followed, or seems endless.
  void poll_in_vain(const Loop& loop);
  // Operations so far that this exploration does not follow, with lines.
  std::set<std::string> not_followed() const;
  // The execution's failure; empty: none so far.
  const std::string& failure() const { return failure_; }
  // The rank that gave up, whose record holds the reason; -1: none has.
  int gave_up() const { return gave_up_; }
  // The waiting threads and their places, when no event is possible.
  std::string waits() const;
  uint64_t digest() const; // of the memory
  History& history() { return history_; }
  const Past& past_of(int event) const { return pasts_[event]; }
  const std::vector<std::string>& texts() const { return texts_; }
  // Ends the execution.
  void end();

  void visit(const void* address, uint64_t bytes, sim::WordAccess access) override;
  void polls() override;
  void wait_begins(const sim::WaitSubject& subject) override;
  void wait_ends() override;
  void gives_up() override {}
  void meet(const std::vector<sim::Fiber*>& fibers) override;
  void begin(const sim::Call& call) override;
  void touch(const void* address, uint64_t bytes, bool store) override;
  void before_sending(const sim::RemoteOperation& operation) override;
  void send(sim::Late&& late) override;
  void reach(const void* word, bool changes) override;
  void fence(int pe) override;
  void ordered(const void* word, sim::WordAccess access, sim::Ordering ordering) override;
  void fenced(uint32_t scope, bool total) override;
  void quiet(int pe) override;

private:
  enum class Next { start, access, wait, polled, stirred, quiet, reach, arrival };
  struct Read {
    const void* address;
    uint64_t bytes, value;
    int site, times;
  };
  struct Operation { // on its way
    sim::Late late;
    uint64_t sequence, fences; // number of earlier operations to the PE
    std::string name;
  };
  struct Process {
    int rank = 0;
    Next next = Next::access;
    bool done = false;
    sim::Fiber* fiber = nullptr;
    std::vector<sim::Fiber*> threads; // of a block that has not begun
    std::shared_ptr<Operation> operation;
    Past past; // of processes that are no threads
    sim::WaitSubject subject{};
    bool waits = false;
    const void* granted = nullptr; // may be read without another decision
    bool looked = false;           // since it polled last
    std::vector<Read> read;        // words and the values found there, since it changed or sent something
    int in_vain = 0;               // how often it continued although they are unchanged
    uint64_t moves = 0, sequence = 0, fences = 0;
    int pe = 0;
    const void* word = nullptr; // that it is about to access
    int64_t block = 0;
  };
  struct Arrived {
    uint64_t sequence, fences;
    const uint64_t* signal;
    Past past;
    // Whether an operation behind this many fences, or on the word, comes after it.
    bool precedes(uint64_t other_fences, const void* word) const { return fences < other_fences || signal == word; }
  };
  struct Running {
    std::unique_ptr<sim::Grid> grid;
    size_t launch = 0;
    std::vector<sim::Fiber*> fibers;
    uint64_t moves = 0; // anything that a thread may poll for
    std::map<int, uint64_t> fences;
    std::map<int, std::vector<int>> on_the_way; // processes, by PE
    std::map<int, std::vector<Arrived>> arrived;
  };

  void launch(int rank, const Past& past);
  void note_gaps(const Running& r);
  void after(int rank);
  bool may_go(const Process& p) const;
  static bool has_changed(const Process& p);
  void read_again(Process& p, const void* at, uint64_t bytes);
  void does(Process& p);
  std::string line() const;
  bool may_arrive(const Process& p) const;
  bool has_reached(const Process& p) const;
  void arrive(Process& p, int number);
  void pause(Next next);
  // After a decision: the running thread's knowledge at the begin of its event.
  Past& current_past();
  Process& self();
  uint64_t fences_of(int rank, int pe) const {
    return kOther | static_cast<uint64_t>(rank) << 16 | static_cast<uint64_t>(pe);
  }
  bool is_seen(uint64_t address) const;
  void describe(const std::string& what);
  static std::string place(const Process& p);

  Setup setup_;
  sim::StackPool stacks_;
  std::vector<Running> ranks_;
  std::deque<Process> processes_;
  History history_;
  std::vector<Past> pasts_;
  std::vector<std::string> texts_;
  uint64_t sequence_ = 0;
  std::string failure_;
  int gave_up_ = -1, rank_ = 0;
  double event_seconds_ = 60;
  bool stalled_ = false;
  Loop new_loop_{-1, ""};
  using Found = std::tuple<std::string, const void*, uint64_t>; // at a line, in a word, a value
  struct Store { // the thread's latest to the word, which a GPU may carry out after the looks
    uint64_t before, number;
    std::map<Found, uint64_t> looks; // at other words, and the number of the first
  };
  using Learnt = std::map<const sim::Fiber*, uint64_t>; // the latest store of each thread
  struct Thread {
    std::map<const void*, Store> stores;
    std::map<const void*, uint64_t> stored; // the number of its latest store to a word
    Learnt learnt;                          // from words, signals and barriers
    const void* changed = nullptr;          // its last access, unless that was a read
    uint64_t found = 0;
  };
  void stores(const void* at, uint64_t before, bool reads);
  void loads(const void* at, uint64_t value);
  std::map<const sim::Fiber*, Thread> threads_;
  std::map<const void*, std::pair<const sim::Fiber*, Learnt>> left_; // in words, by whom last
  std::set<std::pair<Found, Found>>
      late_stores_;        // values that the thread and the other one see if the store comes late
  std::set<Found> polled_; // words read again
  uint64_t accesses_ = 0;
  // Words that a thread has accessed without order before its later accesses, and whether it read them.
  std::map<const sim::Fiber*, std::vector<std::pair<const void*, bool>>> unordered_;
  std::set<std::string> loops_, not_followed_;
  const sim::Fiber* first_ = nullptr; // whose event is in progress; null: a block's or an arrival's
  bool describes_ = false;
  std::unique_ptr<sim::FaultGuard> guard_;
};

} // namespace tsn::explore
