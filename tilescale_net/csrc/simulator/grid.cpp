#include "grid.h"
#include "tilescale_net/csrc/common/clock.h"

#include "fiber.h"
#include "live_state.h"
#include "remote.h"
#include "rules.h"
#include "scheduler.h"

#include <sched.h>
#include <time.h>

namespace tsn::sim {

Grid* current_grid = nullptr;

namespace {
constexpr size_t kStrip = 256; // known bytes on both sides of shared memory
constexpr char kStripByte = '\x5a';
constexpr int kPoison = 0xff; // NaN in every floating-point type

constexpr unsigned kLagsPerLaunch = 2;
constexpr uint64_t kLagNs = 3'000'000;       // during which only lagging warps move
constexpr uint64_t kLagLimitNs = 20'000'000; // longest lag if others never stop
constexpr uint64_t kCheckNs = 50'000'000;    // between two checks for an interrupt
// Threads in flight unless more are needed: their stacks and states then stay in the cache.
constexpr uint64_t kThreadsInFlight = 2048;

char* aligned(char* p, size_t alignment) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + alignment - 1) & ~(alignment - 1));
}
} // namespace

Grid::Grid(const Launch& launch, StackPool& stacks)
    : launch_(launch), stacks_(stacks), random_(launch.seed),
      blocks_(static_cast<uint64_t>(launch.grid.x) * launch.grid.y * launch.grid.z),
      threads_per_block_(launch.block.x * launch.block.y * launch.block.z) {
  // Seeds vary both: how many blocks are in flight, and how long a thread runs undisturbed.
  const uint64_t windows[] = {1, 2, 4, 16, 1ull << 40};
  const uint64_t most = std::max<uint64_t>(1, kThreadsInFlight / threads_per_block_);
  window_ = std::min({windows[random_.below(5)], launch_.resident_blocks, most});
  const int quanta[] = {16, 256, 4096, 1 << 16};
  max_quantum_ = quanta[random_.below(4)];
  late_ = random_.below(3);
  lags_left_ = launch_.communicates && !scheduler ? kLagsPerLaunch : 0;
  const unsigned warps = (threads_per_block_ + 31) / 32;
  heap_ = race_memory(launch_.heap);
  RaceMemory* memory = blocks_ * warps < kMaxWarps ? heap_ : nullptr;
  if (launch_.communicates || launch_.races)
    order_ = std::make_unique<HappensBefore>(warps, launch_.lines, launch_.names, memory, launch_.races);
  if (launch_.races && blocks_ * warps < kMaxWarps)
    local_ = std::make_unique<LocalAccesses>(*order_, warps, launch_.lines);
}

std::set<std::string> Grid::gaps() const {
  std::set<std::string> gaps;
  if (launch_.races || scheduler) gaps = gaps_;
  if (!launch_.races) return gaps;
  if (!local_) gaps.insert(gap_text(Gap::warps));
  if (order_) order_->add_gaps(gaps);
  if (local_) local_->add_gaps(gaps);
  return gaps;
}

void Grid::note_gap(Gap gap) { gaps_.insert(gap_text(gap, in_brackets(launch_.lines, running_->view.site))); }

Grid::~Grid() {
  report_stall(false);
  for (auto& block : active_)
    for (Fiber& fiber : block->threads)
      if (fiber.stack) stacks_.give(fiber.stack);
}

void Grid::run() {
  FaultGuard guard;
  stalled_since_ns_ = now_ns();
  while (finished_ < blocks_ && failure_ == Failure::none) {
    while (active_.size() < window_ && started_ < blocks_) start_block();
    shuffle_order(ready_);
    // Woken threads run in the same round. Its length is bounded, so that polling threads and pending remote
    // operations get their turn beside threads that meet at barriers forever.
    const size_t limit = 64 * ready_.size() + 65536;
    for (position_ = 0; position_ < std::min(ready_.size(), limit) && failure_ == Failure::none; ++position_)
      if (lags(*ready_[position_])) next_.push_back(ready_[position_]);
      else resume(*ready_[position_]);
    if (fault_signal_) describe_fault();
    if (failure_ != Failure::none) break;
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(position_));
    ready_.insert(ready_.end(), next_.begin(), next_.end());
    next_.clear();
    if (finished_ < blocks_ && !between_rounds()) {
      failure_ = race_.empty() ? Failure::deadlock : Failure::race;
      message_ = race_.empty() ? describe_deadlock() : race_;
    }
  }
  if (order_ && failure_ == Failure::none) {
    message_ = race_.empty() ? order_->end() : race_;
    if (!message_.empty()) failure_ = Failure::race;
  }
}

// Evaluates a round. False: nothing will ever happen again.
bool Grid::between_rounds() {
  const bool still = !progress_, moved = strong_progress_;
  progress_ = strong_progress_ = false;
  ++rounds_;
  if (moved) {
    report_stall(false);
    idle_rounds_ = weak_rounds_ = 0;
    stalled_since_ns_ = now_ns();
  }
  if (lagging_ && lag_step(still)) return true;
  // Threads may also poll in ways that look like work; remote operations and waiting blocks get their turn anyway.
  const bool idle = still || (!moved && ++weak_rounds_ % 16 == 0);
  const bool going_on = idle ? idle_step(still) : (rounds_ % 16 == 0 && remote_progress(random_, false), true);
  if (rounds_ % 64 == 0 && now_ns() - checked_ns_ > kCheckNs) {
    checked_ns_ = now_ns();
    if (launch_.check_interrupt && launch_.check_interrupt()) failure_ = Failure::interrupted;
  }
  return going_on;
}

// After a wait, some warps of the block pause until nothing else has moved in this rank for a while: the
// others, and other ranks, run as far as they can without them.
void Grid::begin_lag(Block& block) {
  if (!block.after_wait || !lags_left_ || lagging_ || block.warps.size() < 2) return;
  block.after_wait = false;
  if (random_.below(4) == 0) return;
  // Thread 0 makes most of the accesses that other ranks see, so its warp seldom lags.
  const bool first_too = random_.below(4) == 0;
  for (size_t w = 0; w < block.warps.size(); ++w) block.warps[w].lags = w ? random_.below(4) != 0 : first_too;
  --lags_left_;
  lagging_ = true;
  lag_idle_since_ns_ = 0;
  lag_end_ns_ = now_ns() + kLagLimitNs;
}

void Grid::end_lag() {
  for (auto& block : active_)
    for (Warp& warp : block->warps) warp.lags = false;
  lagging_ = false;
  idle_rounds_ = 0; // they have not looked in this round
}

// True: nothing moved, and the round is over.
bool Grid::lag_step(bool still) {
  const uint64_t now = now_ns();
  if (now > lag_end_ns_) {
    end_lag();
    return false;
  }
  if (!still || remote_progress(random_, true)) {
    lag_idle_since_ns_ = 0;
    return false;
  }
  if (!lag_idle_since_ns_) lag_idle_since_ns_ = now;
  if (now - lag_idle_since_ns_ > kLagNs) {
    end_lag();
    return true;
  }
  const timespec nap{0, 100'000};
  nanosleep(&nap, nullptr);
  return true;
}

char* Grid::prepare_shared(Block& block) {
  if (!launch_.shared_bytes) return nullptr;
  if (!block.shared) block.shared.reset(new char[launch_.shared_bytes + 2 * kStrip + 1024]);
  char* const shared = aligned(block.shared.get() + kStrip, 1024);
  memset(shared - kStrip, kStripByte, kStrip);
  memset(shared, kPoison, launch_.shared_bytes);
  memset(shared + launch_.shared_bytes, kStripByte, kStrip);
  if (local_) local_->forget(shared, launch_.shared_bytes);
  return shared;
}

// Index of the `i`-th block of a grid or thread of a block, x first.
static Index3 place_of(uint64_t i, const Index3& extent) {
  Index3 at;
  at.x = static_cast<unsigned>(i % extent.x);
  at.y = static_cast<unsigned>(i / extent.x % extent.y);
  at.z = static_cast<unsigned>(i / extent.x / extent.y);
  return at;
}

void Grid::start_block() {
  std::unique_ptr<Block> block;
  if (spare_.empty()) {
    block = std::make_unique<Block>();
    block->threads.resize(threads_per_block_);
    block->warps.resize((threads_per_block_ + 31) / 32);
  } else {
    block = std::move(spare_.back());
    spare_.pop_back();
  }
  block->index = started_++;
  block->live = static_cast<int>(threads_per_block_);
  for (Barrier& barrier : block->barriers) barrier = Barrier();
  block->votes = 0;
  block->after_wait = false;
  block->variables.clear();
  char* const shared = prepare_shared(*block);
  for (size_t w = 0; w < block->warps.size(); ++w) {
    const unsigned lanes = std::min<unsigned>(32, threads_per_block_ - static_cast<unsigned>(w) * 32);
    block->warps[w].members = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    block->warps[w].exited = 0;
    block->warps[w].pending_ops.clear();
    block->warps[w].lags = false;
  }
  const Index3 at = place_of(block->index, launch_.grid);
  for (unsigned i = 0; i < threads_per_block_; ++i) {
    Fiber& fiber = block->threads[i];
    fiber.call = {};
    fiber.view.thread_idx = place_of(i, launch_.block);
    fiber.view.block_idx = at;
    fiber.view.block_dim = launch_.block;
    fiber.view.grid_dim = launch_.grid;
    fiber.view.linear = i;
    fiber.view.lane = i % 32;
    fiber.view.linear_block = static_cast<unsigned>(block->index);
    fiber.view.dynamic_shared = shared;
    fiber.view.dynamic_shared_bytes = launch_.shared_bytes;
    fiber.block = block.get();
    fiber.state = State::fresh;
    fiber.view.site = -1;
    fiber.view.uses_result = true;
    fiber.view.stores = fiber.view.loads = {};
    fiber.view.heap_sites = nullptr;
    fiber.view.heap_base = heap_ ? heap_->base : 0;
    fiber.view.heap_bytes = heap_ ? heap_->bytes : 0;
    fiber.view.followed = fiber.view.loads_followed = false;
    fiber.view.scheduled = scheduler != nullptr;
    fiber.process = -1;
    fiber.past.reset();
    fiber.view.local = nullptr;
    fiber.view.peers_begin = fiber.view.peers_bytes = 0;
    memset(fiber.view.local_known, 0, sizeof fiber.view.local_known);
    fiber.view.ordered_store = fiber.view.ordered_load = 0;
    fiber.put_epoch = 0;
    fiber.announced = false;
    ready_.push_back(&fiber);
  }
  active_.push_back(std::move(block));
}

// The order in which a round runs its threads: as they come, backwards, or shuffled.
void Grid::shuffle_order(std::vector<Fiber*>& list) {
  const uint64_t choice = random_.below(4);
  if (choice == 0) std::reverse(list.begin(), list.end());
  if (choice < 2) return;
  for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random_.below(i)]);
}

void Grid::fiber_main() {
  Grid& grid = *current_grid;
  grid.launch_.entry(grid.launch_.arguments);
  grid.running_->state = State::done;
  grid.leave();
}

void Grid::resume(Fiber& fiber) {
  if (fiber.state == State::fresh) {
    fiber.stack = stacks_.take();
    fiber.context = make_context(fiber.stack, stacks_.bytes(), &Grid::fiber_main);
    progress_ = strong_progress_ = true;
  }
  fiber.state = State::running;
  fiber.view.quantum = scheduler ? 1 << 30 : 1 + static_cast<int>(random_.below(static_cast<uint64_t>(max_quantum_)));
  running_ = &fiber;
  *launch_.self = &fiber.view;
  restamp();
  ++switches_;
  tsn_sim_switch(&scheduler_, fiber.context);
  running_ = nullptr;
  if (fiber.state == State::done) finish(fiber);
}

// Apart from leave(), which does not return from a thread's last switch and so may leave nothing on its stack.
__attribute__((noinline)) void Grid::judge_store() {
  std::string wrong = local_->stored();
  if (race_.empty()) race_ = std::move(wrong);
}

void Grid::leave() {
  if (local_) judge_store();
  tsn_sim_switch(&running_->context, scheduler_);
}

void Grid::finish(Fiber& fiber) {
  progress_ = strong_progress_ = true;
  stacks_.give(fiber.stack);
  fiber.stack = nullptr;
  Block& block = *fiber.block;
  Warp& warp = block.warps[fiber.view.linear / 32];
  warp.exited |= 1u << fiber.view.lane;
  for (const PendingWarpOp& pending : warp.pending_ops)
    if (pending.mask >> fiber.view.lane & 1) {
      failure_ = Failure::kernel;
      char what[160];
      snprintf(what, sizeof(what), "lane %u ended while other lanes wait for it in a warp operation with mask 0x%08x",
               fiber.view.lane, pending.mask);
      message_ = where(fiber) + ": " + what;
      return;
    }
  if (--block.live) return;
  check_shared(block);
  ++finished_;
  const auto place = std::find_if(active_.begin(), active_.end(), [&](auto& b) { return b.get() == &block; });
  spare_.push_back(std::move(*place));
  *place = std::move(active_.back());
  active_.pop_back();
  if (active_.size() < window_ && started_ < blocks_) start_block();
}

void Grid::wake(Fiber* fiber) {
  fiber->state = State::ready;
  ready_.push_back(fiber);
  progress_ = strong_progress_ = true;
}

void Grid::yield(bool polled) {
  if (scheduler && polled) return scheduler->polls();
  running_->state = State::yielded;
  next_.push_back(running_);
  if (!polled) progress_ = true;
  leave();
}

void Grid::check_shared(Block& block) {
  if (!launch_.shared_bytes) return;
  const char* shared = aligned(block.shared.get() + kStrip, 1024);
  for (size_t i = 0; i < kStrip; ++i) {
    const bool before = shared[-static_cast<ptrdiff_t>(i) - 1] != kStripByte;
    if (!before && shared[launch_.shared_bytes + i] == kStripByte) continue;
    failure_ = Failure::out_of_bounds;
    message_ = concat(block_name(block), " wrote outside its shared memory: ", i, " bytes ",
                      before ? "before its start" : "past its end", " (it has ", launch_.shared_bytes, " bytes)");
    return;
  }
}

void* Grid::static_shared(int id, size_t bytes) {
  auto& [memory, size] = running_->block->variables[id];
  if (!memory) {
    size = bytes + 1024;
    memory.reset(new char[bytes + 1024]);
    memset(memory.get(), kPoison, bytes + 1024);
    if (local_) local_->forget(memory.get(), bytes + 1024);
  }
  return aligned(memory.get(), 1024);
}

// Shows other ranks whether all runnable threads wait for words of the heap.
void Grid::report_stall(bool waits) {
  if (!heap_) return;
  Page& page = heap_->own();
  LiveWait one{};
  waits = waits && !pending_operations() && !ready_.empty() && waits_for_words(ready_.size(), &one);
  const bool same = one.since_ns == stall_began_ns_; // else it has seen its signal, and waits for another one
  stall_began_ns_ = one.since_ns;
  waits = waits && same;
  if (waits && !page.stalled) {
    page.stalled_site = heap_->site(primitive_name(one.subject.operation, 0, launch_.names, one.line) +
                                    in_brackets(launch_.lines, one.line));
    page.stalled_word = heap_->offset(one.subject.word);
  }
  if (waits || page.stalled) __atomic_store_n(&page.stalled, waits ? page.stalled + 1 : 0, __ATOMIC_RELEASE);
}

// Whether every runnable thread has tested an mbarrier without success in a round in which no phase has ended: only
// threads of their blocks arrive there.
bool Grid::stands_at_mbarriers() const {
  return !lagging_ && idle_rounds_ &&
         std::all_of(ready_.begin(), ready_.end(), [](const Fiber* f) { return f->view.at_mbarrier; });
}

// After a round in which nothing moved; `still`: no thread did anything but poll.
bool Grid::idle_step(bool still) {
  if (remote_progress(random_, still)) {
    report_stall(false);
    return true;
  }
  report_stall(!lagging_ && (blocks_ == started_ || active_.size() == launch_.resident_blocks));
  if (started_ < blocks_ && active_.size() < launch_.resident_blocks) {
    const uint64_t room = launch_.resident_blocks - active_.size();
    for (uint64_t n = std::min<uint64_t>(room, active_.size() + 1); n && started_ < blocks_; --n) start_block();
    return true;
  }
  if (ready_.empty() || (still && stands_at_mbarriers())) return false;
  const double idle_seconds = static_cast<double>(now_ns() - stalled_since_ns_) * 1e-9;
  if (idle_seconds > launch_.stall_seconds) return false;
  // A race may be the cause: it is reported before any wait gives up, here or in another rank.
  if (!race_.empty() && idle_seconds > launch_.race_seconds) {
    failure_ = Failure::race;
    message_ = race_;
    return true;
  }
  if (!still) return true;
  starved_ = std::max(starved_, blocks_ - started_);
  // Every thread polls for another process: let it run.
  if (++idle_rounds_ < 64) {
    sched_yield();
  } else {
    const timespec nap{0, idle_rounds_ < 1024 ? 20000 : 200000};
    nanosleep(&nap, nullptr);
  }
  return true;
}

Scheduler* scheduler = nullptr;

std::vector<std::vector<Fiber*>> Grid::threads_of_blocks() {
  std::vector<std::vector<Fiber*>> blocks;
  window_ = blocks_;
  while (started_ < blocks_) {
    start_block();
    blocks.push_back(std::move(ready_));
    ready_.clear();
  }
  return blocks;
}

void Grid::go_on(const std::vector<Fiber*>& fibers) {
  current_grid = this;
  ready_ = fibers;
  while (!ready_.empty() && failure_ == Failure::none) {
    for (position_ = 0; position_ < ready_.size() && failure_ == Failure::none; ++position_) resume(*ready_[position_]);
    if (fault_signal_) describe_fault();
    ready_ = std::move(next_);
    next_.clear();
  }
  current_grid = nullptr;
}

void Grid::pause() {
  running_->state = State::paused;
  leave();
}

} // namespace tsn::sim
