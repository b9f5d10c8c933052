// The part of HappensBefore that tracks what threads know of each other: which puts are complete, by fences and quiets,
// and for which ranks by signals; and what words of memory propagate, by loads, stores and atomic operations with an
// order and a scope, and by fences beside those without.
//
// As in PTX: a thread that acquires a word after another has released it knows what that one knew, if the scope of each
// holds the other: a block, a rank, all ranks. A relaxed access propagates nothing, unless a fence of its thread stands
// before a write, or after a read; then the narrower of the two scopes counts.
#include "happens_before.h"
#include "rules.h"
#include "tilescale_net/device/add_mailbox.h"

#include <algorithm>

namespace tsn {
namespace sim {

HappensBefore::Put HappensBefore::made_put(const Event& event) {
  Put put{event};
  for (const auto& entry : fences_) {
    const Event& fence = entry.second;
    if ((fence.pe == event.pe || fence.pe == -1) && !comes_before(fence, event.warp, event.lane))
      put.beside = true, put.fence = fence;
  }
  return put;
}

void HappensBefore::add_put(const Put& put) {
  const Event& event = put.event;
  if (follows_ranks_ && event.lane < kEveryLane) note_thread_put(event);
  else if (follows_ranks_) put_epochs_[{event.warp, event.pe}] = event.epoch;
  std::vector<Put>& list = puts_[{event.warp, event.pe}];
  if (!list.empty() && list.back().event.epoch == event.epoch && list.back().event.line == event.line) return;
  if (list.size() < kMaxPuts) list.push_back(put);
  else more_puts_ = true;
}

void HappensBefore::cover(const Event& fence) {
  for (auto it = puts_.begin(); it != puts_.end();) {
    const auto entry = it++;
    if (fence.pe != -1 && fence.pe != entry->first.second) continue;
    std::vector<Put>& list = entry->second;
    list.erase(
        std::remove_if(list.begin(), list.end(), [&](Put& p) { return comes_before(p.event, fence.warp, fence.lane); }),
        list.end());
    for (Put& put : list) put.beside = true, put.fence = fence;
    if (list.empty()) puts_.erase(entry);
  }
  fences_[{fence.warp, fence.pe}] = fence;
}

uint32_t HappensBefore::stores_before(const Event& event, int pe) {
  uint32_t all = at(event.warp).epoch;
  for (unsigned other = 0; event.lane < kEveryLane && other < kEveryLane; ++other) {
    const auto it = lane_epochs_.find({event.warp * 32ull + other, pe});
    if (other == event.lane || it == lane_epochs_.end()) continue;
    const uint32_t known = known_steps(event.warp, event.lane, event.warp, other);
    if (known < it->second) all = std::min(all, known);
  }
  return all;
}

void HappensBefore::note_thread_put(const Event& event) {
  lane_epochs_[{event.warp * 32ull + event.lane, event.pe}] = event.epoch;
  thread_epochs_[{event.warp, event.pe}] = event.epoch;
}

Known HappensBefore::completed(const Event& event, Part part) {
  State& state = at(event.warp);
  const Known& known = known_to(state, event.lane);
  if (!follows_ranks_) return known;
  auto before = std::make_shared<Clock>(), more = std::make_shared<Clock>();
  const auto concerns = [&](int pe) { return event.pe == -1 || event.pe == pe; };
  const auto add = [&](Clock& to, const std::pair<uint32_t, int>& by, uint64_t lanes, uint32_t epoch) {
    to.emplace_back(clock_key(part, memory_->me, by.first, by.second, lanes), epoch);
  };
  // Those of earlier launches come before it.
  for (const auto& [by, epoch] : memory_->put_epochs)
    if (concerns(by.second)) add(*before, by, 0, epoch);
  for (const auto& [by, epoch] : memory_->thread_epochs)
    if (concerns(by.second)) add(*before, by, kAllLanes, epoch);
  // What whole warps put takes all of their lanes.
  for (const auto& [by, latest] : put_epochs_) {
    const uint32_t epoch = std::min(known_steps(event.warp, event.lane, by.first, kEveryLane), latest);
    if (concerns(by.second) && epoch >= first_epoch_) add(*more, by, 0, epoch);
  }
  for (const auto& [by, latest] : thread_epochs_) {
    if (!concerns(by.second)) continue;
    const bool own = by.first == event.warp;
    const uint32_t all = std::min(
        own ? stores_before(event, by.second) : known_steps(event.warp, event.lane, by.first, kEveryLane), latest);
    if (all >= first_epoch_) add(*more, by, kAllLanes, all);
    for (unsigned lane = 0; all < latest && lane < kEveryLane; ++lane) {
      const auto it = lane_epochs_.find({by.first * 32ull + lane, by.second});
      if (it == lane_epochs_.end()) continue;
      const bool self = own && lane == event.lane;
      const uint32_t one = self ? it->second : known_steps(event.warp, event.lane, by.first, lane);
      if (one > all) add(*more, by, lane + 1, std::min(one, it->second));
    }
  }
  std::sort(before->begin(), before->end());
  std::sort(more->begin(), more->end());
  return join(join(known, before), more);
}

// A signal to a PE carries the puts to it that are fenced.
const Known& HappensBefore::sent_by(State& state, unsigned lane, int pe) {
  Sent& sent = state.sent[pe];
  const Known& known = known_to(state, lane);
  if (sent.from == known) return sent.sent;
  sent = {known, join(known, std::make_shared<Clock>(fenced_puts(known, pe)))};
  return sent.sent;
}

Clock HappensBefore::fenced_puts(const Known& known, int pe) const {
  Clock done;
  for (const auto& [key, epoch] : *known)
    if (part_of(key) == Part::fenced && rank_of(key) == memory_->me && pe_of(key) == pe)
      done.emplace_back(clock_key(Part::done, memory_->me, warp_of(key), pe, word_of(key)), epoch);
  return done;
}

Message HappensBefore::message(uint32_t warp, unsigned lane, int pe, const uint64_t* signal, uint32_t put_epoch) {
  State& state = at(warp);
  const Known& sent = sent_by(state, lane, pe);
  Message out{};
  out.word = signal ? memory_->offset(signal) / 8 : kAnyWord;
  out.rank = memory_->me;
  out.warp = warp;
  out.epoch = state.epoch;
  out.lane = lane;
  out.floor = state.floor;
  out.pe = pe;
  out.carried = put_epoch;
  out.everything = sent->size() > kMaxCarried;
  if (!out.everything) {
    out.entries = static_cast<uint32_t>(sent->size());
    out.at = memory_->publish(sent);
  }
  signalled_ = without_lanes(join(signalled_, with_own(warp, state, lane)));
  turn(state, state.known);
  return out;
}

namespace {
constexpr uint64_t kMailboxBegin = kAddMailboxWords * 8;
constexpr uint64_t kMailboxEnd = kMailboxBegin + kMaxAddMailboxes * kAddMailboxStride * 8;
constexpr size_t index_of(MemScope scope) { return static_cast<size_t>(scope); }
} // namespace

void HappensBefore::Left::learn(const Known& more, const Clock& own) {
  const bool known_already = latest == more || covers(known, more);
  if (!known_already) known = join(known, more);
  latest = more;
  if (join_in_place(known, own) || !known_already) known = without_lanes(known);
}

Known HappensBefore::Word::acquired(uint32_t block, MemScope scope) const {
  const auto it = of_block.find(block);
  const Known own = it == of_block.end() ? nothing_known() : it->second.known;
  return scope == MemScope::cta ? own : join(of_rank.known, own);
}

void HappensBefore::Word::learn(const Known& known, const Clock& own, uint32_t block, MemScope scope) {
  of_block[block].learn(known, own);
  if (scope != MemScope::cta) of_rank.learn(known, own);
}

std::string HappensBefore::word(const Actor& actor, const void* address, uint64_t bytes, WordAccess access,
                                Ordering ordering) {
  const uint32_t warp = actor.warp;
  const unsigned lane = actor.lane();
  State& state = at(warp);
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const bool reads = access != WordAccess::write, writes = access != WordAccess::read;
  bool shared = false; // with other ranks
  int owner = -1;      // in whose heap it lies
  Known of_others = nothing_known();
  std::string wrong;
  if (memory_) {
    const uint64_t offset = memory_->offset(address);
    // A thread that finds an entry of a mailbox carries out what a proxy has left there; this orders no threads.
    if (offset >= kMailboxBegin && offset < kMailboxEnd) return "";
    owner = memory_->holds(address) ? memory_->me : memory_->owner(address);
    shared = owner >= 0 && (owner != memory_->me || offset >= kSystemBytes);
    if (shared) {
      const uint64_t base = owner == memory_->me ? memory_->base : memory_->heaps[static_cast<size_t>(owner)];
      const uint64_t at = reinterpret_cast<uint64_t>(address) - base;
      if (writes && !follows_ranks_) memory_->leave_unknown(address);
      if (follows_ranks_ && bytes) wrong = compared(actor, owner, at, bytes, access, scope);
      if (reads && scope == MemScope::sys) of_others = acquired_by_word(owner, at);
    }
  }
  const uint32_t block = warp / warps_per_block_;
  const Known before = known_to(state, lane);
  Known known = before;
  const auto found = words_.find(address);
  if (reads && (found != words_.end() || !of_others->empty())) {
    const auto acquired = [&](MemScope by) {
      const Known here = found == words_.end() ? nothing_known() : found->second.acquired(block, by);
      return by == MemScope::sys ? join(here, of_others) : here;
    };
    if (ordering.acquires) {
      known = join_again(before, acquired(scope));
    } else {
      Beside& beside = beside_[thread_key(warp, lane)];
      for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys})
        beside.found[index_of(fence)] = join(beside.found[index_of(fence)], acquired(std::min(fence, scope)));
    }
  }
  if (writes) release(warp, lane, address, ordering, shared, owner);
  // Polls that learn nothing leave no trace, however many there are.
  if (known != before || (writes && ordering.releases)) learn(state, lane, std::move(known));
  return wrong;
}

void HappensBefore::release(uint32_t warp, unsigned lane, const void* address, Ordering ordering, bool shared,
                            int owner) {
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const uint32_t block = warp / warps_per_block_;
  const auto leave = [&](const Known& known, const Clock& own, MemScope to) {
    words_[address].learn(known, own, block, to);
    if (!shared || to != MemScope::sys) return;
    signalled_ = join(signalled_, known), join_in_place(signalled_, own);
    if (follows_ranks_)
      memory_->send(owner,
                    left_in(warp, owner, address, own.empty() ? known : join(known, std::make_shared<Clock>(own))));
  };
  const State& state = at(warp);
  if (ordering.releases) return leave(known_to(state, lane), own_steps(warp, state, lane), scope);
  const auto it = beside_.find(thread_key(warp, lane));
  if (it == beside_.end()) return;
  for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys})
    if (const Known& known = it->second.fenced[index_of(fence)]; !known->empty())
      leave(known, {}, std::min(fence, scope));
}

void HappensBefore::fenced(uint32_t warp, unsigned lane, MemScope scope) {
  State& state = at(warp);
  Beside& beside = beside_[thread_key(warp, lane)];
  const Known& found = beside.found[index_of(scope)];
  beside.fenced[index_of(scope)] = join(with_own(warp, state, lane), found);
  learn(state, lane, join(known_to(state, lane), found));
}

bool HappensBefore::leaves(uint32_t warp, unsigned lane, const void* word, Message* out) {
  const auto it = beside_.find(thread_key(warp, lane));
  const int owner = memory_->owner(word);
  if (it == beside_.end() || owner < 0) return false;
  const Known& known = it->second.fenced[index_of(MemScope::sys)];
  if (known->empty()) return false;
  signalled_ = join(signalled_, known);
  *out = left_in(warp, owner, word, known);
  return true;
}

// As in CUDA, the stores through views and the atomic operations that come before are there as well.
Message HappensBefore::left_in(uint32_t warp, int owner, const void* address, const Known& known) {
  Sent& left = at(warp).left[owner];
  if (left.from != known) {
    auto stores = std::make_shared<Clock>();
    for (const auto& [by, epoch] : direct_epochs_) {
      const uint32_t thread_warp = static_cast<uint32_t>(by.first / 32);
      const unsigned lane = by.first % 32;
      const uint32_t before = std::min(epoch, steps_known(known, memory_->me, thread_warp, lane));
      if (before >= first_epoch_)
        stores->emplace_back(clock_key(Part::done, memory_->me, thread_warp, by.second, lane + 1), before);
    }
    for (const auto& [by, epoch] : memory_->thread_epochs)
      stores->emplace_back(clock_key(Part::done, memory_->me, by.first, by.second, kAllLanes), epoch);
    std::sort(stores->begin(), stores->end());
    left = {known, join(join(known, stores), std::make_shared<Clock>(fenced_puts(known, owner)))};
  }
  Message out{};
  const uint64_t base = owner == memory_->me ? memory_->base : memory_->heaps[static_cast<size_t>(owner)];
  out.word = (reinterpret_cast<uint64_t>(address) - base) / 8;
  out.rank = memory_->me;
  out.pe = owner;
  out.left = true;
  out.everything = left.sent->size() > kMaxCarried;
  if (!out.everything) {
    out.entries = static_cast<uint32_t>(left.sent->size());
    out.at = memory_->publish(left.sent);
  }
  return out;
}

// A counter of this rank's own threads, such as one that gives out work, propagates nothing of other ranks.
Known HappensBefore::acquired_by_word(int rank, uint64_t offset) {
  if (!follows_ranks_) return join(memory_->everything(), signalled_);
  const Inbox& inbox = memory_->receive(rank, signalled_);
  const auto it = inbox.words.find(offset / 8);
  return it == inbox.words.end() ? inbox.any : join(inbox.any, it->second.guaranteed({true, false, 0}, 0, start_));
}

} // namespace sim
} // namespace tsn
