#include "remote.h"

#include "grid.h"
#include "live_state.h"
#include "memory.h"
#include "rules.h"
#include "tilescale_net/device/types.h"

#include <condition_variable>
#include <list>
#include <pthread.h>

namespace tsn::sim {

namespace {

constexpr uint64_t kMaxPieces = 16;
constexpr uint64_t kPieceAlignment = 64;
// Operations to one PE that may wait at a time. It bounds how late one can be: by that many younger ones.
constexpr size_t kMaxPending = 256;
constexpr int kHoldsPerLaunch = 8;
constexpr auto kAfterKernel = std::chrono::milliseconds(2);

using SteadyClock = std::chrono::steady_clock;

struct Pending : Late {
  uint64_t epoch;                                    // fences to this PE before it was issued
  uint64_t sequence;                                 // order of issue
  std::vector<std::pair<uint64_t, uint64_t>> pieces; // offset and size of data still to be delivered
  bool may_be_held() const { return !pieces.empty() || operation.number != Number::none; }
};

struct Target {
  std::list<Pending> pending;
  uint64_t epoch = 0;
  // A signal has overtaken data, or atomic operations: those issued before `held_before` stay back until then, so
  // that the other rank, another process, has time to look.
  uint64_t held_before = 0;
  SteadyClock::time_point held_until;
};

struct Store {
  std::mutex mutex;
  std::map<int, Target> targets;
  uint64_t sequence = 0;
  Visibility visibility = Visibility::random;
  int holds_left = 0; // of this launch; see hold()
  std::condition_variable wake;
  bool has_background = false;
  bool flush_soon = false;
};
// Never destroyed: the background thread may outlive the end of main(). A forked child starts with an empty one,
// because the parent's may have been locked, and its operations are the parent's to deliver.
Store* the_store = nullptr;
Store& store() {
  if (!the_store) {
    the_store = new Store;
    pthread_atfork(nullptr, nullptr, [] {
      const Visibility visibility = the_store->visibility;
      the_store = new Store;
      the_store->visibility = visibility;
    });
  }
  return *the_store;
}

template <class T>
void carry_out_on(const RemoteOperation& o) {
  using Word = WordOf<T>;
  const auto number = [](Word bits) {
    T out;
    memcpy(&out, &bits, sizeof out);
    return out;
  };
  const Word operand = static_cast<Word>(o.value);
  const auto next = [&](Word old) -> Word {
    const T a = number(old), b = number(operand);
    T out = b;
    switch (static_cast<AtomicOp>(o.atomic)) {
    case AtomicOp::add:
      if constexpr (!std::is_floating_point<T>::value) return old + operand; // wraps
      out = a + b;
      break;
    case AtomicOp::min:
      out = b < a ? b : a;
      break;
    case AtomicOp::max:
      out = a < b ? b : a;
      break;
    case AtomicOp::and_:
      return old & operand;
    case AtomicOp::or_:
      return old | operand;
    case AtomicOp::xor_:
      return old ^ operand;
    case AtomicOp::exch:
      return operand;
    }
    Word bits;
    memcpy(&bits, &out, sizeof bits);
    return bits;
  };
  Word* word = reinterpret_cast<Word*>(o.peer_signal);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, next(old), false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

void carry_out(const RemoteOperation& o) {
  switch (o.number) {
  case Number::int32:
    return carry_out_on<int32_t>(o);
  case Number::uint32:
    return carry_out_on<uint32_t>(o);
  case Number::int64:
    return carry_out_on<int64_t>(o);
  case Number::uint64:
    return carry_out_on<uint64_t>(o);
  case Number::float32:
    return carry_out_on<float>(o);
  case Number::float64:
    return carry_out_on<double>(o);
  case Number::none:
    return;
  }
}

void deliver_piece(Pending& p, size_t i) {
  const auto piece = p.pieces[i];
  p.pieces[i] = p.pieces.back();
  p.pieces.pop_back();
  p.deliver(piece.first, piece.second);
}

// Whether an earlier operation must arrive before one on the word behind this many fences.
bool precedes(const Pending& earlier, uint64_t epoch, const void* word) {
  return earlier.epoch < epoch || earlier.operation.peer_signal == word;
}

// Whether the signal of `p` may arrive now: its own data, everything fenced before it, and earlier signals to the word.
bool signal_may_go(const Target& target, const Pending& p) {
  if (!p.pieces.empty()) return false;
  for (const Pending& other : target.pending) {
    if (other.sequence >= p.sequence) break;
    if (precedes(other, p.epoch, p.operation.peer_signal)) return false;
  }
  return true;
}

// A signal is delivered: delays the data that it overtakes, for a bounded time.
void hold(Store& s, Target& target, uint64_t sequence, Random& random) {
  if (!s.holds_left) return;
  for (const Pending& p : target.pending)
    if (p.sequence < sequence && p.may_be_held()) {
      --s.holds_left;
      target.held_before = sequence;
      target.held_until = SteadyClock::now() + std::chrono::microseconds(500 + random.below(2500));
      return;
    }
}

bool holds(const Target& target) { return target.held_before && SteadyClock::now() < target.held_until; }

// All of the oldest operation, which waits for no other.
void deliver_oldest(Target& target) {
  Pending& p = target.pending.front();
  while (!p.pieces.empty()) deliver_piece(p, p.pieces.size() - 1);
  if (p.operation.peer_signal) p.deliver_signal();
  target.pending.pop_front();
}

void deliver_all(Target& target) {
  while (!target.pending.empty()) deliver_oldest(target);
}

// One step of a random operation of a random PE. Returns whether anything was delivered.
bool deliver_step(Store& s, Random& random) {
  std::vector<Target*> busy;
  for (auto& entry : s.targets)
    if (!entry.second.pending.empty()) busy.push_back(&entry.second);
  if (busy.empty()) return false;
  Target& target = *busy[random.below(busy.size())];
  // Late operations are preferred half of the time, so that younger ones overtake older ones.
  const size_t n = target.pending.size();
  const bool held = holds(target);
  size_t pick = random.below(n);
  if (random.below(2)) pick = n - 1 - pick / 4;
  auto it = std::next(target.pending.begin(), static_cast<ptrdiff_t>(pick));
  for (size_t tried = 0; tried < n; ++tried, ++it) {
    if (it == target.pending.end()) it = target.pending.begin();
    Pending& p = *it;
    bool done = false;
    if (held && p.sequence < target.held_before && p.may_be_held()) continue;
    if (!p.pieces.empty()) {
      deliver_piece(p, random.below(p.pieces.size()));
      done = p.pieces.empty() && !p.operation.peer_signal;
    } else if (signal_may_go(target, p)) {
      hold(s, target, p.sequence, random);
      p.deliver_signal();
      done = true;
    } else {
      continue; // its turn has not come
    }
    if (done) target.pending.erase(it);
    return true;
  }
  return false;
}

void cut(Pending& p, Random& random) {
  const uint64_t bytes = static_cast<uint64_t>(p.operation.bytes);
  if (!p.operation.destination || bytes == 0) return;
  const uint64_t pieces = 1 + random.below(std::min(kMaxPieces, (bytes + kPieceAlignment - 1) / kPieceAlignment));
  const uint64_t size = (bytes / pieces + kPieceAlignment) / kPieceAlignment * kPieceAlignment;
  for (uint64_t at = 0; at < bytes; at += size) p.pieces.push_back({at, std::min(size, bytes - at)});
}

void fail_if(const std::string& wrong, const char* name, int pe) {
  if (wrong.empty() || !current_grid || !current_grid->running()) return;
  current_grid->fail(Failure::out_of_bounds,
                     std::string(name) + (pe >= 0 ? concat(" to PE ", pe) : std::string()) + ": " + wrong);
}

// Whether the signal of a launch's operation is followed, then with its contents.
void follow(Late& late) {
  const RemoteOperation& o = late.operation;
  Grid& grid = *current_grid;
  if (o.number != Number::none) {
    const AtomicOp op = static_cast<AtomicOp>(o.atomic);
    const bool whole = o.number < Number::float32;
    const int64_t value = bytes_of(o.number) == 4 ? static_cast<int32_t>(o.value) : static_cast<int64_t>(o.value);
    const bool adds = whole && op == AtomicOp::add;
    if (grid.leaves(o.peer_signal, {adds ? Written::add : Written::other, value}, &late.message))
      late.memory = grid.heap();
    return;
  }
  if (o.peer_signal && grid.signalling(o.signal, o.pe, o.value, o.add, &late.message)) late.memory = grid.heap();
}

bool defer(const RemoteOperation& o) {
  if (scheduler) scheduler->before_sending(o);
  Pending p;
  p.operation = o;
  p.each_run(0, static_cast<uint64_t>(o.bytes), [&](uint64_t to, uint64_t from, uint64_t bytes) {
    if (o.destination) fail_if(check_range(address_of(o.destination) + to, bytes), o.name, o.pe);
    if (o.source) fail_if(check_range(address_of(o.source) + from, bytes), o.name, o.pe);
  });
  if (o.signal && o.number == Number::none) fail_if(check_range(address_of(o.signal), 8), o.name, o.pe);
  if (o.bytes == 0 && !o.peer_signal) return true; // an empty put leaves nothing to deliver
  follow(p);
  if (scheduler) {
    p.keep_source();
    scheduler->send(std::move(p));
    return true;
  }
  Grid& grid = *current_grid;
  Store& s = store();
  Random random(grid.random());
  std::lock_guard<std::mutex> lock(s.mutex);
  Target& target = s.targets[o.pe];
  bool later = s.visibility != Visibility::eager && (s.visibility == Visibility::late || grid.roll_delay());
  if (!later && o.peer_signal)
    for (const Pending& other : target.pending) later = later || precedes(other, target.epoch, o.peer_signal);
  if (!later) {
    if (o.peer_signal) hold(s, target, s.sequence, random);
    if (p.memory && o.number == Number::none) p.memory->send(o.pe, p.message); // else the access reports it
    return false;
  }
  if (target.pending.size() >= kMaxPending) deliver_oldest(target);
  p.epoch = target.epoch;
  p.sequence = s.sequence++;
  cut(p, random);
  if (!p.pieces.empty()) p.keep_source();
  target.pending.push_back(std::move(p));
  return true;
}

template <typename F>
void for_targets(int pe, F f) {
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (auto& entry : s.targets)
    if (pe < 0 || entry.first == pe) f(entry.second);
}

void fence(int pe) {
  if (scheduler) return scheduler->fence(pe);
  for_targets(pe, [](Target& target) { ++target.epoch; });
}

void quiet(int pe) {
  if (scheduler) return scheduler->quiet(pe);
  for_targets(pe, deliver_all);
}

// The distance between the heap of the operation's target and this rank's own.
uint64_t distance_of(const RemoteOperation& o) {
  return o.peer_signal ? address_of(o.peer_signal) - address_of(o.signal)
                       : address_of(o.peer) - address_of(o.destination);
}

void reach(const void* word, bool changes) {
  if (scheduler) return scheduler->reach(word, changes);
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (auto& entry : s.targets) {
    Target& target = entry.second;
    if (target.pending.empty() || !in_heap(address_of(word) - distance_of(target.pending.front().operation))) continue;
    size_t n = 0, last = 0;
    for (const Pending& p : target.pending)
      if (++n; precedes(p, changes ? target.epoch : 0, word)) last = n;
    for (; last; --last) deliver_oldest(target);
    Random random(current_grid->random());
    if (changes) hold(s, target, s.sequence, random);
  }
}

void check(const char* name, const void* p, uint64_t bytes) { fail_if(check_range(address_of(p), bytes), name, -1); }

void background() {
  Store& s = store();
  std::unique_lock<std::mutex> lock(s.mutex);
  for (;;) {
    s.wake.wait(lock, [&] { return s.flush_soon; });
    lock.unlock();
    std::this_thread::sleep_for(kAfterKernel);
    lock.lock();
    s.flush_soon = false;
    for (auto& entry : s.targets) deliver_all(entry.second);
  }
}

} // namespace

void Late::keep_source() {
  const RemoteOperation& o = operation;
  if (!o.destination || o.bytes == 0 || (o.source && in_heap(address_of(o.source)))) return;
  copy.reset(new char[o.bytes]);
  const char* source = o.source ? static_cast<const char*>(o.source) : reinterpret_cast<const char*>(&o.value);
  char* end = copy.get();
  each_run(0, static_cast<uint64_t>(o.bytes), [&](uint64_t, uint64_t from, uint64_t bytes) {
    memcpy(end, source + from, bytes);
    end += bytes;
  });
}

void Late::deliver(uint64_t at, uint64_t bytes) const {
  char* peer = static_cast<char*>(operation.peer);
  const char* source = static_cast<const char*>(operation.source);
  uint64_t packed = at; // a copy holds the rows consecutively
  each_run(at, bytes, [&](uint64_t to, uint64_t from, uint64_t run) {
    memcpy(peer + to, copy ? copy.get() + packed : source + from, run);
    packed += run;
  });
}

// The message comes first: a thread that sees the signal finds its contents.
void Late::deliver_signal() const {
  const RemoteOperation& o = operation;
  if (memory) memory->send(o.pe, message);
  if (o.number != Number::none) return carry_out(o);
  if (o.add) __atomic_fetch_add(o.peer_signal, o.value, __ATOMIC_RELEASE);
  else __atomic_store_n(o.peer_signal, o.value, __ATOMIC_RELEASE);
}

const RemoteApi kRemoteApi = {
    [](const Call& call) { current_grid->announce(call); },
    [](const Call& call) {
      if (scheduler) scheduler->begin(call);
      else live_call(call);
      current_grid->begin(call);
    },
    [](const uint64_t* signal) { current_grid->waited(signal); },
    [](const void* address, uint64_t bytes, WordAccess access, Ordering ordering, Written written) {
      current_grid->word(address, bytes, access, ordering, written);
    },
    [](int64_t value, bool (*ends)(const void*, int64_t), const void* condition) {
      current_grid->polled(value, {ends, condition});
    },
    [](uint32_t scope, bool total) { current_grid->fenced(scope, total); },
    [](const void* address, uint64_t bytes, WordAccess access) { scheduler->visit(address, bytes, access); },
    [](const void* address, uint64_t bytes, bool store, const char* name) {
      current_grid->accessed(address, bytes, store, name);
    },
    [](const void* address, uint64_t bytes, bool store, const char* name) {
      if (scheduler) scheduler->touch(address, bytes, store);
      current_grid->viewed(address, bytes, store, name);
    },
    [](const void* address, uint64_t bytes, LocalAccess access, const char* name, const void* base) {
      // An atomic operation counts as a look as well.
      if (scheduler && access < LocalAccess::atomic) scheduler->touch(address, bytes, access == LocalAccess::store);
      current_grid->local_access(address, bytes, access, name, base);
    },
    [](const void* address, uint64_t bytes) { current_grid->benign_race(address, bytes); },
    [] { current_grid->note_gap(Gap::pointers); },
    [](const uint64_t* signal, int pe, uint64_t value, bool add) {
      Message message;
      if (current_grid->signalling(signal, pe, value, add, &message)) current_grid->heap()->send(pe, message);
    },
    defer,
    [](uint64_t ticket, bool ended) { current_grid->flushed(ticket, ended); },
    reach,
    fence,
    quiet,
    check,
};

void set_visibility(Visibility visibility) {
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.visibility = visibility;
}

void remote_kernel_begin() {
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.holds_left = kHoldsPerLaunch;
}

bool remote_progress(Random& random, bool must) {
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!must && random.below(2)) return false;
  bool any = false;
  for (uint64_t steps = 1 + random.below(8); steps && deliver_step(s, random); --steps) any = true;
  return any;
}

void remote_kernel_end(Random& random) {
  Store& s = store();
  std::lock_guard<std::mutex> lock(s.mutex);
  bool any = false, held = false;
  for (auto& entry : s.targets) {
    any = any || !entry.second.pending.empty();
    held = held || holds(entry.second);
  }
  if (!any) return;
  if (!held && random.below(2)) {
    for (auto& entry : s.targets) deliver_all(entry.second);
    return;
  }
  if (!s.has_background) {
    s.has_background = true;
    std::thread(background).detach();
  }
  s.flush_soon = true;
  s.wake.notify_one();
}

void flush_pending() { quiet(-1); }

uint64_t pending_operations() {
  uint64_t n = 0;
  for_targets(-1, [&](Target& target) { n += target.pending.size(); });
  return n;
}

} // namespace tsn::sim
