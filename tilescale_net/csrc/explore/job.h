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
#include "tilescale_net/csrc/simulator/rules.h"
#include "tilescale_net/device/context.h"

namespace tsn::explore {

constexpr int kMostInVain = 64; // polls of a thread while no other can continue

// A word, and whether it was read.
using Unordered = std::pair<const void*, bool>;

inline void note_once(std::vector<Unordered>& words, const Unordered& word) {
  if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
}

template <class Learnt>
void learn(Learnt& to, const Learnt& from) {
  for (const auto& [thread, number] : from) to[thread] = std::max(to[thread], number);
}

// Place of a thread that is in no wait for a signal.
inline std::string place_of(const sim::Fiber& fiber, const sim::Grid& grid) {
  const int site = fiber.view.site;
  const std::string line = sim::entry_at(grid.launch().lines, site), name = sim::entry_at(grid.launch().names, site);
  if (line.empty()) return grid.latest_call(fiber);
  return (fiber.view.at_mbarrier ? "T.barrier_wait" : name.empty() ? "a loop" : name) + " (" + line + ")";
}

// at most 8 bytes of it
inline uint64_t word_at(const void* p, uint64_t bytes) {
  uint64_t value = 0;
  memcpy(&value, p, std::min<uint64_t>(bytes, 8));
  return value;
}

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
  explicit Job(Setup setup) : setup_(std::move(setup)), stacks_(setup_.stack_bytes) {
    for (Memory& m : setup_.memory) {
      const char* begin = reinterpret_cast<const char*>(m.address);
      m.first.assign(begin, begin + m.bytes);
    }
  }
  ~Job() override { end(); }

  // Begins an execution. `describes`: keep a text of each event.
  void restart(bool describes) {
    end();
    for (const Memory& m : setup_.memory) memcpy(reinterpret_cast<void*>(m.address), m.first.data(), m.bytes);
    describes_ = describes;
    history_.clear();
    for (const Rank& rank : setup_.ranks) sim::note_ended_launches(rank.heap);
    sim::scheduler = this;
    guard_ = std::make_unique<sim::FaultGuard>();
    ranks_.resize(setup_.ranks.size());
    for (size_t r = 0; r < ranks_.size(); ++r) launch(static_cast<int>(r), nullptr);
  }
  // Possible next processes, ascending.
  std::vector<int> enabled() const {
    std::vector<int> out;
    for (size_t i = 0; i < processes_.size(); ++i)
      if (may_go(processes_[i])) out.push_back(static_cast<int>(i));
    if (!out.empty()) return out;
    // A loop that polls may give up.
    for (size_t i = 0; i < processes_.size(); ++i) {
      const Process& p = processes_[i];
      const bool polls = !p.done && p.next == Next::polled && p.fiber && p.fiber->state == sim::State::paused;
      if (polls && p.in_vain < kMostInVain) out.push_back(static_cast<int>(i));
    }
    return out;
  }
  void step(int process) {
    Process& p = processes_[process];
    Past& known = p.fiber ? p.fiber->past : p.past;
    history_.begin(process, known);
    known = history_.past();
    if (describes_) texts_.emplace_back();
    rank_ = p.rank;
    first_ = p.fiber;
    if (p.operation) {
      arrive(p, process);
      pasts_.push_back(history_.past());
      return;
    }
    std::vector<sim::Fiber*> threads{p.fiber};
    if (p.next == Next::start) {
      p.done = true;
      threads = std::move(p.threads);
      for (sim::Fiber* fiber : threads) fiber->past = p.past;
      describe("begins");
    }
    ranks_[p.rank].grid->go_on(threads);
    pasts_.push_back(history_.past());
    after(p.rank);
  }
  // All kernels have ended, and all their operations have arrived.
  bool ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Running& r) { return !r.grid; }) &&
           std::all_of(processes_.begin(), processes_.end(), [](const Process& p) { return p.done; });
  }
  // The block of the process: rank * 2^32 + block; -1: an operation in flight.
  int64_t block_of(int process) const {
    const Process& p = processes_[process];
    return p.operation ? -1 : p.block;
  }
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
  void poll_in_vain(const Loop& loop) {
    const Process& p = processes_[loop.process];
    int before = p.in_vain;
    while (!p.done && p.fiber && p.fiber->state == sim::State::paused && failure_.empty()) {
      if (p.in_vain >= kMostInVain) return;
      if (p.in_vain < before || (p.next != Next::polled && p.next != Next::access)) break; // it does something else
      before = p.in_vain;
      step(loop.process);
    }
    not_followed_.insert(sim::gap_text(sim::Gap::polls, loop.line));
  }
  // Operations so far that this exploration does not follow, with lines.
  std::set<std::string> not_followed() const {
    std::set<std::string> all = not_followed_;
    for (const auto& [found, other] : late_stores_) // another look makes up for it
      if (!polled_.count(found) && !polled_.count(other))
        all.insert(sim::gap_text(sim::Gap::late_stores, std::get<0>(found)));
    return all;
  }
  // The execution's failure; empty: none so far.
  const std::string& failure() const { return failure_; }
  // The rank that gave up, whose record holds the reason; -1: none has.
  int gave_up() const { return gave_up_; }
  // The waiting threads and their places, when no event is possible.
  std::string waits() const {
    std::string out;
    int shown = 0;
    for (const Process& p : processes_) {
      if (p.done || !p.fiber || p.fiber->state != sim::State::paused) continue;
      if (++shown == 9) return out + "; …";
      const sim::Grid& grid = *ranks_[p.rank].grid;
      const bool waits = p.waits && p.subject.word;
      out += (out.empty() ? "" : "; ") + place(p) + " in " +
             (waits ? grid.latest_call(*p.fiber) : place_of(*p.fiber, grid));
      if (waits) out += concat(" for ", p.subject.wanted, ", has ", static_cast<int64_t>(*p.subject.word));
    }
    for (size_t r = 0; r < ranks_.size() && !shown; ++r)
      if (ranks_[r].grid) out += (out.empty() ? "" : "; ") + (concat("rank ", r, ": threads at a barrier"));
    return out;
  }
  // of the memory
  uint64_t digest() const {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const Memory& m : setup_.memory)
      for (uint64_t at = 0; at < m.bytes; at += 8) {
        hash = (hash ^ word_at(reinterpret_cast<const void*>(m.address + at), m.bytes - at)) * 0x100000001b3ull;
        hash ^= hash >> 29;
      }
    return hash;
  }
  History& history() { return history_; }
  const Past& past_of(int event) const { return pasts_[event]; }
  const std::vector<std::string>& texts() const { return texts_; }
  // Ends the execution.
  void end() {
    for (const Running& r : ranks_) note_gaps(r);
    ranks_.clear();
    processes_.clear();
    pasts_.clear();
    texts_.clear();
    unordered_.clear();
    threads_.clear();
    left_.clear();
    guard_.reset();
    sequence_ = 0;
    failure_.clear();
    gave_up_ = -1;
    stalled_ = false;
    sim::scheduler = nullptr;
  }

  void visit(const void* at, uint64_t bytes, sim::WordAccess access) override {
    const uint64_t where = address_of(at);
    for (const auto& [begin, end] : setup_.unseen)
      if (where >= begin && where < end) return;
    Process& p = self();
    if (p.granted == at) {
      p.granted = nullptr;
      loads(at, word_at(at, bytes));
      return;
    }
    if (access == sim::WordAccess::read) read_again(p, at, bytes);
    else pause(Next::access);
    if (access == sim::WordAccess::read) loads(at, word_at(at, bytes));
    else stores(at, word_at(at, bytes), access == sim::WordAccess::update);
    Past& past = current_past();
    if (access == sim::WordAccess::read) history_.touch(where, bytes, Use::read, past);
    else if (bytes == 8) history_.change(static_cast<const uint64_t*>(at), Change::other, 0, past);
    else history_.touch(where, bytes, Use::write, past);
    p.looked = access != sim::WordAccess::write;
    if (access == sim::WordAccess::read) return;
    if (access == sim::WordAccess::write) does(p);
    else p.read.clear(); // it may be a retried compare and swap
  }
  void polls() override {
    Process& p = self();
    if (p.waits && p.subject.word) {
      pause(Next::wait);
      const bool looks = p.subject.operation == kOpWait && p.fiber->view.uses_result;
      history_.seen(p.subject.word, {p.subject.comparison - 1, p.subject.wanted}, looks, current_past());
      p.granted = p.subject.word;
      return;
    }
    if (p.looked) p.looked = false; // the next read shows whether the value is the same
    else pause(Next::stirred);
  }
  void wait_begins(const sim::WaitSubject& subject) override {
    Process& p = self();
    p.subject = subject;
    p.waits = subject.comparison != 0;
  }
  void wait_ends() override {
    Process& p = self();
    p.waits = false;
    p.granted = nullptr;
  }
  void gives_up() override {}
  void meet(const std::vector<sim::Fiber*>& fibers) override {
    Past all = current_past();
    for (const sim::Fiber* fiber : fibers) all = joined(all, fiber->past);
    current_past() = all;
    for (sim::Fiber* fiber : fibers) fiber->past = all;
    if (!unordered_.empty()) { // a barrier orders nothing for threads that do not meet at it
      std::vector<Unordered> words = unordered_[sim::current_grid->running()];
      for (const sim::Fiber* fiber : fibers)
        for (const Unordered& word : unordered_[fiber]) note_once(words, word);
      for (const sim::Fiber* fiber : fibers) unordered_[fiber] = words;
      unordered_[sim::current_grid->running()] = std::move(words);
    }
    if (!threads_.empty()) {
      Learnt learnt = threads_[sim::current_grid->running()].learnt;
      for (const sim::Fiber* fiber : fibers) learn(learnt, threads_[fiber].learnt);
      for (const sim::Fiber* fiber : fibers) threads_[fiber].learnt = learnt;
      threads_[sim::current_grid->running()].learnt = std::move(learnt);
    }
    ++ranks_[rank_].moves;
  }
  // A get reads and writes immediately, like loads and stores.
  void begin(const sim::Call& call) override {
    if (call.operation != kOpGet || call.bytes <= 0 || call.pe < 0 || call.pe >= static_cast<int>(ranks_.size()))
      return;
    const uint64_t distance = setup_.ranks[call.pe].heap - setup_.ranks[rank_].heap;
    call.each_row([&](const void* to, const void* from) {
      touch(reinterpret_cast<const void*>(address_of(from) + distance), static_cast<uint64_t>(call.bytes), false);
      touch(to, static_cast<uint64_t>(call.bytes), true);
    });
  }
  void touch(const void* at, uint64_t bytes, bool store) override {
    ++ranks_[rank_].moves;
    if (!bytes) return;
    if (!is_seen(address_of(at))) {
      if (!setup_.races) not_followed_.insert(sim::gap_text(sim::Gap::shared, line()));
      return;
    }
    history_.set_apart(first_ && first_ != sim::current_grid->running());
    history_.touch(address_of(at), bytes, store ? Use::write : Use::read, current_past());
  }
  void before_sending(const sim::RemoteOperation& operation) override {
    Process& p = self();
    does(p);
    pause(Next::access);
    Past& past = current_past();
    history_.touch(fences_of(rank_, operation.pe), Use::read, past);
    // Signals of a rank to one word arrive in the order in which they were sent.
    const uint64_t word =
        kOther | 1ull << 62 | (address_of(operation.peer_signal) ^ static_cast<uint64_t>(rank_) << 48);
    if (operation.peer_signal) history_.touch(word, operation.add ? Use::add : Use::write, past);
    if (operation.peer_signal)
      learn(left_[operation.peer_signal].second, threads_[sim::current_grid->running()].learnt);
  }
  void send(sim::Late&& late) override {
    Running& r = ranks_[rank_];
    const int pe = late.operation.pe;
    const std::string name = describes_ ? sim::current_grid->latest_call(*sim::current_grid->running()) : "";
    auto operation = std::make_shared<Operation>(Operation{std::move(late), sequence_++, r.fences[pe], name});
    // The source is read now.
    const sim::RemoteOperation& sent = operation->late.operation;
    operation->late.each_run(0, sent.source ? static_cast<uint64_t>(sent.bytes) : 0,
                             [&](uint64_t, uint64_t from, uint64_t bytes) {
                               touch(static_cast<const char*>(sent.source) + from, bytes, false);
                             });
    if (!setup_.races && sent.source && sent.bytes) not_followed_.insert(sim::gap_text(sim::Gap::sources, line()));
    r.on_the_way[pe].push_back(static_cast<int>(processes_.size()));
    Process& made = processes_.emplace_back();
    made.rank = rank_;
    made.next = Next::arrival;
    made.operation = std::move(operation);
    made.past = current_past();
  }
  void reach(const void* word, bool changes) override {
    const sim::RaceMemory* memory = sim::race_memory(setup_.ranks[rank_].heap);
    const int pe = memory ? memory->owner(word) : -1;
    if (pe < 0) return;
    Running& r = ranks_[rank_];
    Process& p = self();
    p.pe = pe;
    p.word = word;
    p.fences = changes ? r.fences[pe] : 0;
    if (changes) history_.touch(fences_of(rank_, pe), Use::read, current_past());
    if (!has_reached(p)) pause(Next::reach);
    for (const Arrived& a : r.arrived[pe])
      if (a.precedes(p.fences, word)) current_past() = joined(current_past(), a.past);
    history_.learn(current_past());
  }
  void fence(int pe) override {
    unordered_[sim::current_grid->running()].clear();
    Process& p = self();
    does(p);
    pause(Next::access);
    for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) {
      if (pe != -1 && pe != to) continue;
      ++ranks_[rank_].fences[to];
      history_.touch(fences_of(rank_, to), Use::add, current_past());
    }
  }
  // An exploration executes a thread's word accesses in program order.
  void ordered(const void* word, sim::WordAccess access, sim::Ordering ordering) override {
    const sim::Fiber* fiber = sim::current_grid->running();
    if (!is_seen(address_of(word)) || (fiber->process >= 0 && self().waits)) return;
    for (const auto& [begin, end] : setup_.unseen)
      if (address_of(word) >= begin && address_of(word) < end) return;
    std::vector<Unordered>& words = unordered_[fiber];
    const bool reads = access != sim::WordAccess::write, writes = access != sim::WordAccess::read;
    const bool overtakes = std::any_of(words.begin(), words.end(), [&](const Unordered& before) {
      return before.first != word && (writes || before.second);
    });
    if (overtakes && !(writes && ordering.releases)) {
      not_followed_.insert(sim::gap_text(sim::Gap::reordered, line()));
      words.clear();
    }
    if (writes || !ordering.acquires) note_once(words, {word, reads});
    Thread& thread = threads_[fiber];
    if (writes || thread.changed == word) return;
    if (ordering.total) thread.stores.clear();
    for (auto& [stored, store] : thread.stores)
      if (stored != word) store.looks.try_emplace({line(), word, thread.found}, ++accesses_);
  }
  void fenced(uint32_t scope, bool total) override {
    if (total && scope != static_cast<uint32_t>(MemScope::cta)) threads_[sim::current_grid->running()].stores.clear();
    if (scope != static_cast<uint32_t>(MemScope::cta)) unordered_[sim::current_grid->running()].clear();
  }
  void quiet(int pe) override {
    unordered_[sim::current_grid->running()].clear();
    Process& p = self();
    does(p);
    p.pe = pe;
    p.sequence = sequence_;
    pause(Next::quiet);
    for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) {
      if (pe != -1 && pe != to) continue;
      history_.touch(fences_of(rank_, to), Use::add, current_past());
      for (const Arrived& a : ranks_[rank_].arrived[to])
        if (a.sequence < p.sequence) current_past() = joined(current_past(), a.past);
      history_.learn(current_past());
    }
  }

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

  void launch(int rank, const Past& past) {
    Running& r = ranks_[rank];
    const Rank& made_of = setup_.ranks[rank];
    note_gaps(r);
    r.fibers.clear();
    r.grid.reset();
    if (r.launch == made_of.launches.size()) return;
    sim::Launch next = made_of.launches[r.launch++];
    next.stall_seconds = event_seconds_;
    r.grid = std::make_unique<sim::Grid>(next, stacks_);
    int64_t block = 0;
    for (std::vector<sim::Fiber*>& threads : r.grid->threads_of_blocks()) {
      r.fibers.insert(r.fibers.end(), threads.begin(), threads.end());
      Process& p = processes_.emplace_back();
      p.rank = rank;
      p.next = Next::start;
      p.past = past;
      p.block = static_cast<int64_t>(rank) << 32 | block++;
      p.threads = std::move(threads);
    }
  }
  void note_gaps(const Running& r) {
    if (r.grid) not_followed_.merge(r.grid->gaps());
  }
  // Effects of the event beyond the threads that ran.
  void after(int rank) {
    Running& r = ranks_[rank];
    for (size_t i = 0; i < setup_.ranks.size(); ++i)
      if (setup_.ranks[i].error && *reinterpret_cast<const uint32_t*>(setup_.ranks[i].error))
        gave_up_ = static_cast<int>(i);
    if (gave_up_ >= 0) failure_ = concat("rank ", gave_up_, " gave up");
    const std::string name = concat("rank ", rank, ": kernel ", r.grid->launch().kernel, ": ");
    stalled_ = r.grid->failure() == sim::Failure::deadlock;
    if (r.grid->failure() != sim::Failure::none)
      failure_ = name + r.grid->message() + (r.grid->line().empty() ? "" : " [" + r.grid->line() + "]");
    else if (setup_.races && !r.grid->race().empty()) failure_ = name + r.grid->race();
    if (!failure_.empty() || !r.grid->ended()) return;
    Past all;
    for (const sim::Fiber* fiber : r.fibers) all = joined(all, fiber->past);
    for (Process& p : processes_) {
      if (p.rank != rank || p.operation) continue;
      p.done = true;
      p.fiber = nullptr;
    }
    launch(rank, all);
  }
  bool may_go(const Process& p) const {
    if (p.done || (p.fiber && p.fiber->state != sim::State::paused)) return false;
    const Running& r = ranks_[p.rank];
    switch (p.next) {
    case Next::wait:
      return Condition{p.subject.comparison - 1, p.subject.wanted}.holds(*p.subject.word);
    case Next::polled:
      return has_changed(p);
    case Next::stirred:
      return r.moves != p.moves;
    case Next::quiet:
      for (const auto& [pe, list] : r.on_the_way)
        if (p.pe == -1 || p.pe == pe)
          for (int number : list)
            if (processes_[number].operation->sequence < p.sequence) return false;
      return true;
    case Next::reach:
      return has_reached(p);
    case Next::arrival:
      return may_arrive(p);
    default:
      return true;
    }
  }
  // State of the words that it has read.
  static bool has_changed(const Process& p) {
    return std::any_of(p.read.begin(), p.read.end(),
                       [](const Read& read) { return word_at(read.address, read.bytes) != read.value; });
  }
  // A thread that repeatedly finds the same value in a word at the same place of the kernel is in a polling loop: it
  // continues when one of the words read there has changed, or when no other thread can run.
  void read_again(Process& p, const void* at, uint64_t bytes) {
    constexpr int kStraight = 2; // reads of a word at a place that are no loop yet
    const int site = sim::current_grid->running()->view.site;
    const auto known = std::find_if(p.read.begin(), p.read.end(),
                                    [&](const Read& read) { return read.address == at && read.site == site; });
    if (known == p.read.end() || known->times < kStraight || word_at(at, bytes) != known->value) {
      pause(Next::access);
      const uint64_t found = word_at(at, bytes);
      const bool changed = std::any_of(p.read.begin(), p.read.end(), [&](const Read& read) {
        return read.address == at && read.value != found; // the loop continues with a new value
      });
      if (!changed && known != p.read.end()) {
        ++known->times;
        polled_.insert({line(), at, found});
        return;
      }
      if (changed) p.read.clear();
      p.read.push_back({at, bytes, found, site, 1});
      return;
    }
    if (loops_.insert(line()).second) new_loop_ = {sim::current_grid->running()->process, line()};
    pause(Next::polled);
    p.in_vain = has_changed(p) ? 0 : p.in_vain + 1;
    for (const Read& read : p.read)
      for (uint64_t place = address_of(read.address) / 4; place <= (address_of(read.address) + read.bytes - 1) / 4;
           ++place)
        history_.touch(place, Use::read, current_past(), false);
    p.read.clear();
  }
  // The thread does something other than read words.
  void does(Process& p) {
    p.read.clear();
    p.looked = false;
    p.in_vain = 0;
  }
  std::string line() const {
    return sim::in_brackets(sim::current_grid->launch().lines, sim::current_grid->running()->view.site);
  }
  bool may_arrive(const Process& p) const {
    const Running& r = ranks_[p.rank];
    const Operation& o = *p.operation;
    if (!o.late.operation.peer_signal) return true;
    const auto list = r.on_the_way.find(o.late.operation.pe);
    for (int number : list->second) {
      const Operation& other = *processes_[number].operation;
      if (other.sequence >= o.sequence) break;
      if (other.fences < o.fences || other.late.operation.peer_signal == o.late.operation.peer_signal) return false;
    }
    return true;
  }
  // Whether all operations that must precede the thread's next access have arrived.
  bool has_reached(const Process& p) const {
    const Running& r = ranks_[p.rank];
    const auto list = r.on_the_way.find(p.pe);
    return list == r.on_the_way.end() || std::none_of(list->second.begin(), list->second.end(), [&](int number) {
             const Operation& o = *processes_[number].operation;
             return o.fences < p.fences || o.late.operation.peer_signal == p.word;
           });
  }
  void arrive(Process& p, int number) {
    Running& r = ranks_[p.rank];
    const Operation& o = *p.operation;
    const sim::RemoteOperation& made = o.late.operation;
    std::vector<Arrived>& earlier = r.arrived[made.pe];
    for (const Arrived& a : earlier)
      if (a.sequence < o.sequence && a.precedes(o.fences, made.peer_signal))
        p.past = made.peer_signal ? joined(p.past, a.past) : p.past;
    history_.learn(p.past);
    o.late.each_run(0, made.destination ? static_cast<uint64_t>(made.bytes) : 0,
                    [&](uint64_t to, uint64_t from, uint64_t bytes) {
                      if (!bytes) return;
                      const uint64_t source = address_of(made.source) + from;
                      if (!o.late.copy && is_seen(source)) history_.touch(source, bytes, Use::read, p.past);
                      history_.touch(address_of(made.peer) + to, bytes, Use::write, p.past);
                    });
    if (made.destination) o.late.deliver(0, static_cast<uint64_t>(made.bytes));
    if (made.peer_signal) {
      const bool narrow = made.number != sim::Number::none && sim::bytes_of(made.number) == 4;
      const Change::Kind kind = made.add ? Change::add : made.number == sim::Number::none ? Change::set : Change::other;
      if (narrow) history_.touch(address_of(made.peer_signal), 4, made.add ? Use::add : Use::write, p.past);
      else history_.change(made.peer_signal, kind, made.value, p.past);
      o.late.deliver_signal();
    }
    earlier.push_back({o.sequence, o.fences, made.peer_signal, p.past});
    std::vector<int>& list = r.on_the_way[made.pe];
    list.erase(std::find(list.begin(), list.end(), number));
    p.done = true;
    for (Running& rank : ranks_) ++rank.moves;
    describe(concat("has arrived at PE ", made.pe));
  }
  void pause(Next next) {
    Process& p = self();
    p.next = next;
    uint64_t& moves = ranks_[rank_].moves;
    if (next == Next::stirred) p.moves = moves;
    else ++moves;
    sim::current_grid->pause();
    if (describes_) describe("at " + sim::current_grid->latest_call(*p.fiber));
  }
  // After a decision: the running thread's knowledge at the begin of its event.
  Past& current_past() { return sim::current_grid->running()->past; }
  Process& self() {
    sim::Fiber* fiber = sim::current_grid->running();
    if (fiber->process < 0) {
      fiber->process = static_cast<int>(processes_.size());
      Process& made = processes_.emplace_back();
      made.rank = rank_;
      made.fiber = fiber;
      made.block = static_cast<int64_t>(rank_) << 32 | fiber->view.linear_block;
    }
    return processes_[fiber->process];
  }
  uint64_t fences_of(int rank, int pe) const {
    return kOther | static_cast<uint64_t>(rank) << 16 | static_cast<uint64_t>(pe);
  }
  bool is_seen(uint64_t at) const {
    const auto next = std::upper_bound(setup_.memory.begin(), setup_.memory.end(), at,
                                       [](uint64_t a, const Memory& m) { return a < m.address; });
    return next != setup_.memory.begin() && at - std::prev(next)->address < std::prev(next)->bytes;
  }
  void describe(const std::string& what) {
    if (!describes_ || texts_.empty()) return;
    const Process& p = processes_[history_.process_of(static_cast<int>(texts_.size()) - 1)];
    texts_.back() =
        p.operation ? concat("what rank ", p.rank, " sent by ", p.operation->name, " ", what) : place(p) + " " + what;
  }
  static std::string place(const Process& p) {
    const std::string rank = concat("rank ", p.rank);
    if (!p.fiber) return concat(rank, " block ", p.block & 0xffffffff);
    return concat(rank, " block ", p.fiber->view.linear_block, " thread ", p.fiber->view.linear);
  }

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
  void stores(const void* at, uint64_t before, bool reads) {
    const sim::Fiber* fiber = sim::current_grid->running();
    Thread& thread = threads_[fiber];
    auto& [by, learnt] = left_[at];
    if (reads) learn(thread.learnt, learnt);
    thread.changed = at;
    thread.stored[at] = thread.learnt[fiber] = ++accesses_;
    thread.stores[at] = {before, accesses_, {}};
    by = fiber;
    learnt = thread.learnt;
  }
  // A store of another thread that a GPU may execute after that thread's later load of a word that this thread has
  // stored to: this load may see the old value, so each has overtaken the other.
  void loads(const void* at, uint64_t value) {
    const sim::Fiber* fiber = sim::current_grid->running();
    Thread& thread = threads_[fiber];
    thread.changed = nullptr;
    thread.found = value;
    const auto left = left_.find(at);
    if (left == left_.end()) return;
    const sim::Fiber* by = left->second.first;
    if (by && by != fiber && !self().waits) {
      const std::map<const void*, Store>& late = threads_[by].stores;
      if (const auto store = late.find(at); store != late.end() && thread.learnt[by] < store->second.number)
        for (const auto& [look, number] : store->second.looks)
          if (const auto own = thread.stored.find(std::get<1>(look));
              own != thread.stored.end() && own->second > number)
            late_stores_.insert({look, {line(), at, store->second.before}});
    }
    learn(thread.learnt, left->second.second);
  }
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
