// What the running thread reports to a job: where it can be overtaken, and what it does there.
#include "job.h"

#include "tilescale_net/csrc/common/address_of.h"
#include "tilescale_net/csrc/simulator/rules.h"
#include "tilescale_net/device/context.h"

#include <algorithm>
#include <string.h>

namespace tsn {
namespace explore {

Job::Process& Job::self() {
  sim::Fiber* fiber = sim::current_grid->running();
  if (fiber->process < 0) {
    fiber->process = static_cast<int>(processes_.size());
    Process& made = processes_.emplace_back();
    made.rank = rank_;
    made.fiber = fiber;
    made.block = static_cast<int64_t>(rank_) << 32 | fiber->view.linear_block;
  }
  return processes_[static_cast<size_t>(fiber->process)];
}

void Job::pause(Next next) {
  Process& p = self();
  p.next = next;
  uint64_t& moves = ranks_[static_cast<size_t>(rank_)].moves;
  if (next == Next::stirred) p.moves = moves;
  else ++moves;
  sim::current_grid->pause();
  if (describes_) describe("at " + sim::current_grid->latest_call(*p.fiber));
}

Past& Job::current_past() { return sim::current_grid->running()->past; }

void Job::visit(const void* at, uint64_t bytes, sim::WordAccess access) {
  const uint64_t where = address_of(at);
  for (const auto& [begin, end] : setup_.unseen)
    if (where >= begin && where < end) return;
  Process& p = self();
  if (p.granted == at) {
    p.granted = nullptr;
    return;
  }
  if (access == sim::WordAccess::read) read_again(p, at, bytes);
  else pause(Next::access);
  Past& past = current_past();
  if (access == sim::WordAccess::read) history_.touch(where, bytes, Use::read, past);
  else if (bytes == 8) history_.change(static_cast<const uint64_t*>(at), Change::other, 0, past);
  else history_.touch(where, bytes, Use::write, past);
  p.looked = access != sim::WordAccess::write;
  if (access == sim::WordAccess::read) return;
  if (access == sim::WordAccess::write) does(p);
  else p.read.clear(); // it may be a compare and swap that is tried again
}

// A thread that has found the same in a word at the same place of the kernel again and again is in a loop that polls:
// it goes on when one of the words that it has read there has changed, or when no other thread can go on.
void Job::read_again(Process& p, const void* at, uint64_t bytes) {
  constexpr int kStraight = 2; // reads of a word at a place that are no loop yet
  const int site = sim::current_grid->running()->view.site;
  const auto known = std::find_if(p.read.begin(), p.read.end(),
                                  [&](const Read& read) { return read.address == at && read.site == site; });
  if (known == p.read.end() || known->times < kStraight || word_at(at, bytes) != known->value) {
    pause(Next::access);
    const uint64_t found = word_at(at, bytes);
    const bool changed = std::any_of(p.read.begin(), p.read.end(), [&](const Read& read) {
      return read.address == at && read.value != found; // the loop goes on with something new
    });
    if (!changed && known != p.read.end()) {
      ++known->times;
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

// The thread does something else than to read words.
void Job::does(Process& p) {
  p.read.clear();
  p.looked = false;
  p.in_vain = 0;
}

std::string Job::line() const {
  const sim::Grid& grid = *sim::current_grid;
  const int site = grid.running()->view.site;
  const std::vector<std::string>& lines = grid.launch().lines;
  return site >= 0 && static_cast<size_t>(site) < lines.size() ? " (" + lines[static_cast<size_t>(site)] + ")" : "";
}

void Job::polls() {
  Process& p = self();
  if (p.waits && p.subject.word) {
    pause(Next::wait);
    const bool looks = p.subject.operation == kOpWait && p.fiber->view.uses_result;
    history_.seen(p.subject.word, {p.subject.comparison - 1, p.subject.wanted}, looks, current_past());
    p.granted = p.subject.word;
    return;
  }
  if (p.looked) p.looked = false; // the next read shows whether it found the same
  else pause(Next::stirred);
}

void Job::wait_begins(const sim::WaitSubject& subject) {
  Process& p = self();
  p.subject = subject;
  p.waits = subject.comparison != 0;
}

void Job::wait_ends() {
  Process& p = self();
  p.waits = false;
  p.granted = nullptr;
}

void Job::meet(const std::vector<sim::Fiber*>& fibers) {
  Past all = current_past();
  for (const sim::Fiber* fiber : fibers) all = joined(all, fiber->past);
  current_past() = all;
  for (sim::Fiber* fiber : fibers) fiber->past = all;
  ++ranks_[static_cast<size_t>(rank_)].moves;
}

// A get reads and writes at once, like loads and stores.
void Job::begin(const sim::Call& call) {
  if (call.operation != kOpGet || call.bytes <= 0 || call.pe < 0 || call.pe >= static_cast<int>(ranks_.size())) return;
  const uint64_t distance =
      setup_.ranks[static_cast<size_t>(call.pe)].heap - setup_.ranks[static_cast<size_t>(rank_)].heap;
  call.each_row([&](const void* to, const void* from) {
    touch(reinterpret_cast<const void*>(address_of(from) + distance), static_cast<uint64_t>(call.bytes), false);
    touch(to, static_cast<uint64_t>(call.bytes), true);
  });
}

void Job::touch(const void* at, uint64_t bytes, bool store) {
  ++ranks_[static_cast<size_t>(rank_)].moves;
  if (!bytes) return;
  if (!is_seen(address_of(at))) {
    if (!setup_.races) not_followed_.insert(sim::gap_text(sim::Gap::shared, line()));
    return;
  }
  history_.set_apart(first_ && first_ != sim::current_grid->running());
  history_.touch(address_of(at), bytes, store ? Use::write : Use::read, current_past());
}

void Job::before_sending(const sim::RemoteOperation& operation) {
  Process& p = self();
  does(p);
  pause(Next::access);
  Past& past = current_past();
  history_.touch(fences_of(rank_, operation.pe), Use::read, past);
  // Signals of a rank to one word arrive in the order in which they were sent.
  const uint64_t word = kOther | 1ull << 62 | (address_of(operation.peer_signal) ^ static_cast<uint64_t>(rank_) << 48);
  if (operation.peer_signal) history_.touch(word, operation.add ? Use::add : Use::write, past);
}

void Job::send(sim::Late&& late) {
  Running& r = ranks_[static_cast<size_t>(rank_)];
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

void Job::reach(const void* word, bool changes) {
  const sim::RaceMemory* memory = sim::race_memory(setup_.ranks[static_cast<size_t>(rank_)].heap);
  const int pe = memory ? memory->owner(word) : -1;
  if (pe < 0) return;
  Running& r = ranks_[static_cast<size_t>(rank_)];
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

void Job::fence(int pe) {
  Process& p = self();
  does(p);
  pause(Next::access);
  for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) {
    if (pe != -1 && pe != to) continue;
    ++ranks_[static_cast<size_t>(rank_)].fences[to];
    history_.touch(fences_of(rank_, to), Use::add, current_past());
  }
}

void Job::quiet(int pe) {
  Process& p = self();
  does(p);
  p.pe = pe;
  p.sequence = sequence_;
  pause(Next::quiet);
  for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) {
    if (pe != -1 && pe != to) continue;
    history_.touch(fences_of(rank_, to), Use::add, current_past());
    for (const Arrived& a : ranks_[static_cast<size_t>(rank_)].arrived[to])
      if (a.sequence < p.sequence) current_past() = joined(current_past(), a.past);
    history_.learn(current_past());
  }
}

} // namespace explore
} // namespace tsn
