// One launch: blocks, warps and threads of a grid, and the scheduler that runs them in one operating-system thread.
#pragma once

#include "fiber.h"
#include "happens_before.h"
#include "local_accesses.h"
#include "random.h"
#include "rules.h"
#include "scheduler.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn::sim {

struct Block;

// State of a thread; shown if a grid cannot continue.
enum class State : uint8_t { fresh, ready, running, yielded, block_barrier, warp, grid_barrier, paused, done };

struct Fiber {
  Thread view; // first: compiled kernels hold a pointer to it
  void* context = nullptr;
  char* stack = nullptr;
  Block* block = nullptr;
  State state = State::fresh;
  // While it waits in a warp operation or a barrier:
  WarpOp op = WarpOp::sync;
  uint32_t mask = 0;
  uint32_t argument = 0;
  uint64_t value = 0;
  uint64_t result = 0;
  const void* site = nullptr; // of __activemask
  bool converged = false;
  // The call of its scope that it is about to make; its next barrier or warp operation is part of it.
  bool announced = false;
  bool in_put = false; // has met for a put of the block, without a barrier since
  Call call{};
  int call_line = -1;
  uint32_t put_epoch = 0; // of the put_signal that it makes, as its leader; 0: none
  Polled poll{};          // its latest load
  // Under a scheduler: its number there, and the events before it.
  int process = -1;
  Past past;
};

// A warp operation that some lanes of its mask have not reached yet.
struct PendingWarpOp {
  WarpOp op;
  uint32_t mask, arrived;
};

struct Warp {
  uint32_t members = 0, exited = 0;
  std::vector<PendingWarpOp> pending_ops;
  bool lags = false;
};

struct Barrier {
  int expected = 0, arrived = 0;
  std::vector<Fiber*> waiting;
  std::vector<uint32_t> passed; // warps of threads that arrived without waiting
};

struct Block {
  uint64_t index = 0;
  std::vector<Fiber> threads;
  std::vector<Warp> warps;
  int live = 0;
  Barrier barriers[16];
  int votes = 0, vote_result = 0;
  bool after_wait = false;            // a thread has seen a signal since the last barrier
  uint64_t next_value = 0, value = 0; // of a broadcast
  std::unique_ptr<char[]> shared;     // dynamic shared memory between two strips of known bytes
  struct Variable {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
  };
  std::unordered_map<int, Variable> variables;
};

enum class Failure { none, kernel, out_of_bounds, deadlock, interrupted, race };

struct Launch {
  void (*entry)(const uint64_t* arguments) = nullptr;
  const uint64_t* arguments = nullptr;
  Thread** self = nullptr; // the library's pointer to the running thread's view
  uintptr_t text_begin = 0, text_end = 0;
  std::string kernel;
  Index3 grid{1, 1, 1}, block{1, 1, 1};
  uint64_t shared_bytes = 0;
  uint64_t seed = 0;
  uint64_t resident_blocks = 1; // resident blocks of the simulated GPU
  double stall_seconds = 60;    // without any progress: the grid hangs
  double race_seconds = 30;     // the same after a race was found: it ends with the race
  bool (*check_interrupt)() = nullptr;
  bool communicates = false;      // calls primitives
  bool races = false;             // followed by the race detector
  uint64_t heap = 0;              // the base of the heap that its context names, or 0
  std::vector<std::string> lines; // of its primitives
  std::vector<std::string> names; // as the author typed them, or of the ranges that begin at these lines, or ""
};

class Grid {
public:
  explicit Grid(const Launch& launch, StackPool& stacks);
  ~Grid();

  // Runs the grid to its end. On failure the reason is in failure() and message().
  void run();
  // The same in parts, for a scheduler that decides which thread continues: the threads of each block, which have not
  // begun; and runs some of them until none can continue without a decision.
  std::vector<std::vector<Fiber*>> threads_of_blocks();
  void go_on(const std::vector<Fiber*>& fibers);
  bool ended() const { return finished_ == blocks_; }
  // Gaps of the proof, as text.
  std::set<std::string> gaps() const;
  void note_gap(Gap gap);
  // The race detector's findings; after the end also errors of the launch as a whole.
  std::string race() const { return race_.empty() && ended() && order_ ? order_->end() : race_; }
  // Suspends the running thread until it continues.
  void pause();
  // The call that a thread makes or has made last, with its line.
  std::string latest_call(const Fiber& fiber) const;
  std::string where(const Fiber& fiber) const;
  Failure failure() const { return failure_; }
  const std::string& message() const { return message_; }
  // The line of the author's code that failed in a thread, or empty.
  std::string line() const { return entry_at(launch_.lines, failed_at_); }
  // All ranks wait for each other, as a remark for the error of a wait; else empty.
  std::string deadlock() const { return heap_ ? heap_->deadlock() : ""; }
  // Blocks that could not start while all others waited, as a remark for errors; empty without any.
  std::string never_started() const;

  // Calls of the running thread; see simulator_api.h.
  void yield(bool polled);
  void block_barrier(int id, int count, bool arrive_only);
  uint64_t block_vote(VoteOp op, uint64_t value);
  uint64_t warp(WarpOp op, uint32_t mask, uint64_t value, uint32_t argument);
  uint32_t active_mask(const void* site);
  void grid_barrier();
  void* static_shared(int id, size_t bytes);
  void announce(const Call& call);
  void begin(const Call& call);
  void waited(const uint64_t* signal);
  void flushed(uint64_t ticket, bool ended);
  // Contents of a signal about to be sent, by a put_signal or alone.
  bool signalling(const uint64_t* signal, int pe, uint64_t value, bool add, Message* out);
  // The same for a deferred atomic operation on another rank's word.
  bool leaves(const void* word, Written written, Message* out);
  void accessed(const void* address, uint64_t bytes, bool store, const char* name);
  void viewed(const void* address, uint64_t bytes, bool store, const char* name);
  void word(const void* address, uint64_t bytes, WordAccess access, Ordering ordering, Written written);
  // The running thread's latest load has ended its loop by this value; `ends`: all values that end it.
  void polled(int64_t value, Ends ends);
  void fenced(uint32_t scope, bool total);
  void local_access(const void* address, uint64_t bytes, LocalAccess access, const char* name, const void* base);
  void benign_race(const void* address, uint64_t bytes) {
    if (order_) order_->benign_race(address, bytes);
    if (local_) local_->benign_race(address, bytes);
  }
  [[noreturn]] void fail(Failure kind, const std::string& what); // from the running thread

  RaceMemory* heap() const { return heap_; } // whose ranks may be followed; null: none
  uint64_t random() { return random_(); }
  // Whether a remote write of this launch is delayed; one launch in three delays all, one none.
  bool roll_delay() { return random_.below(2) < late_; }
  Fiber* running() const { return running_; }
  void* scheduler_context() const { return scheduler_; }
  const Launch& launch() const { return launch_; }
  // For signal handlers: notes a failure of the running thread without allocating; the thread is then left for good.
  void note_fault(int signal, uintptr_t address);
  uint64_t switches() const { return switches_; }

private:
  static void fiber_main();
  // The shared memory of a block that starts, with strips on both sides that nothing may touch; nullptr: it has none.
  char* prepare_shared(Block& block);
  void start_block();
  void start(Fiber& fiber, unsigned linear, Block& block);
  void resume(Fiber& fiber);
  void judge_store(); // the running thread's latest one, if another thread has stored there
  void leave();       // from the running thread to the scheduler
  void finish(Fiber& fiber);
  void shuffle_order(std::vector<Fiber*>& list);
  void wake(Fiber* fiber);
  void release(Barrier& barrier, bool orders);
  void complete(Block& block, unsigned warp, const PendingWarpOp& pending);
  void compare_calls(const Fiber& first);
  std::string call_of(const Fiber& fiber) const;
  uint32_t warp_number(const Fiber& fiber) const;
  void meet(const std::vector<Fiber*>& fibers, std::vector<uint32_t> warps);
  void meet_block(int id, int count, bool arrive_only, bool orders);
  void restamp();
  Actor actor() const;
  SharedRange shared_range() const;
  bool is_shared(const void* p) const;
  std::string copies(const Call& call);
  void note_unfollowed(const Call& call);
  void begin_lag(Block& block);
  bool lags(const Fiber& fiber) const { return lagging_ && fiber.block->warps[fiber.view.linear / 32].lags; }
  bool lag_step(bool still);
  void end_lag();
  bool between_rounds();
  bool stands_at_mbarriers() const;
  bool idle_step(bool still);
  void report_stall(bool waits);
  void check_shared(Block& block);
  void describe_fault();
  std::string block_name(const Block& block) const;
  std::string describe_deadlock() const;

  Launch launch_;
  StackPool& stacks_;
  Random random_;
  uint64_t blocks_, started_ = 0, finished_ = 0;
  unsigned threads_per_block_;
  uint64_t window_; // blocks that run at a time while there is progress
  int max_quantum_;
  uint64_t late_; // 0: no remote write is delayed, 1: every other one, 2: all
  std::vector<std::unique_ptr<Block>> active_, spare_;
  std::vector<Fiber*> ready_, next_;
  size_t position_ = 0;
  Fiber* running_ = nullptr;
  void* scheduler_ = nullptr;
  bool progress_ = false, strong_progress_ = false;
  unsigned lags_left_ = 0; // of this launch; see begin_lag()
  bool lagging_ = false;
  uint64_t stall_began_ns_ = 0; // of the latest wait
  uint64_t lag_idle_since_ns_ = 0, lag_end_ns_ = 0;
  uint64_t starved_ = 0; // blocks that had no place while all threads polled
  uint64_t rounds_ = 0;
  unsigned idle_rounds_ = 0, weak_rounds_ = 0; // since something moved
  uint64_t stalled_since_ns_ = 0, checked_ns_ = 0;
  uint64_t grid_arrived_ = 0;
  std::vector<Fiber*> grid_waiting_;
  uint64_t switches_ = 0;

  std::unique_ptr<HappensBefore> order_; // of kernels that communicate
  std::unique_ptr<LocalAccesses> local_; // of launches that the race detector follows
  std::string race_;                     // the first one that either found
  std::set<std::string> gaps_;           // that threads have met
  RaceMemory* heap_ = nullptr;

  Failure failure_ = Failure::none;
  std::string message_;
  int failed_at_ = -1; // index of the line
  int fault_signal_ = 0;
  uintptr_t fault_address_ = 0;
};

// The grid that this process runs now, or null.
extern Grid* current_grid;

// As kernels see it.
inline const Thread& running_thread() { return current_grid->running()->view; }

} // namespace tsn::sim
