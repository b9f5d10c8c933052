// The part of HappensBefore that tracks what threads pass to each other by words of memory: loads, stores and atomic
// operations with an order and a scope, and fences beside those without.
//
// As in PTX: a thread that acquires a word after another has released it knows what that one knew, if the scope of each
// holds the other: a block, a rank, all ranks. A relaxed access passes on nothing, unless a fence of its thread stands
// before a write, or after a read; then the narrower of the two scopes counts.
#include "happens_before.h"

#include "tilescale_net/device/add_mailbox.h"

#include <algorithm>

namespace tsn {
namespace sim {

namespace {
constexpr uint64_t kMailboxBegin = kAddMailboxWords * 8;
constexpr uint64_t kMailboxEnd = kMailboxBegin + kMaxAddMailboxes * kAddMailboxStride * 8;
constexpr size_t index_of(MemScope scope) { return static_cast<size_t>(scope); }
} // namespace

void HappensBefore::Left::learn(const Known& more, const Clock& own) {
  const bool told = latest == more || covers(known, more);
  if (!told) known = join(known, more);
  latest = more;
  if (join_in_place(known, own) || !told) known = without_lanes(known);
}

Known HappensBefore::Word::told(uint32_t block, MemScope scope) const {
  const auto it = of_block.find(block);
  const Known own = it == of_block.end() ? nothing_known() : it->second.known;
  return scope == MemScope::cta ? own : join(of_rank.known, own);
}

void HappensBefore::Word::learn(const Known& known, const Clock& own, uint32_t block, MemScope scope) {
  of_block[block].learn(known, own);
  if (scope != MemScope::cta) of_rank.learn(known, own);
}

void HappensBefore::word(uint32_t warp, unsigned lane, const void* address, WordAccess access, Ordering ordering) {
  State& state = at(warp);
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const bool reads = access != WordAccess::write, writes = access != WordAccess::read;
  bool shared = false; // with other ranks
  int owner = -1;      // another one
  Known of_others = nothing_known();
  if (memory_) {
    const uint64_t offset = memory_->offset(address);
    // A thread that finds an entry of a mailbox carries out what a proxy has left there; this orders no threads.
    if (offset >= kMailboxBegin && offset < kMailboxEnd) return;
    const bool own = memory_->holds(address), peers = !own && memory_->is_peer_heap(address);
    shared = (own && offset >= kSystemBytes) || peers;
    if (peers) owner = memory_->owner(address);
    if (peers && writes && !follows_ranks_) memory_->touch(address);
    if (shared && reads && scope == MemScope::sys) of_others = own ? told_by_word(offset) : all_told();
  }
  const uint32_t block = warp / warps_per_block_;
  const Known before = known_to(state, lane);
  Known known = before;
  const auto found = words_.find(address);
  if (reads && (found != words_.end() || !of_others->empty())) {
    const auto told = [&](MemScope by) {
      const Known here = found == words_.end() ? nothing_known() : found->second.told(block, by);
      return by == MemScope::sys ? join(here, of_others) : here;
    };
    if (ordering.acquires) {
      known = join_again(before, told(scope));
    } else {
      Beside& beside = beside_[thread_key(warp, lane)];
      for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys})
        beside.found[index_of(fence)] = join(beside.found[index_of(fence)], told(std::min(fence, scope)));
    }
  }
  if (writes) release(warp, lane, address, ordering, shared, owner);
  // Polls that learn nothing leave no trace, however many there are.
  if (known != before || (writes && ordering.releases)) learn(state, lane, std::move(known));
}

void HappensBefore::release(uint32_t warp, unsigned lane, const void* address, Ordering ordering, bool shared,
                            int owner) {
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const uint32_t block = warp / warps_per_block_;
  const auto tell = [&](const Known& known, const Clock& own, MemScope to) {
    words_[address].learn(known, own, block, to);
    if (!shared || to != MemScope::sys) return;
    signalled_ = join(signalled_, known), join_in_place(signalled_, own);
    if (owner >= 0 && follows_ranks_)
      memory_->send(owner,
                    left_in(warp, owner, address, own.empty() ? known : join(known, std::make_shared<Clock>(own))));
  };
  const State& state = at(warp);
  if (ordering.releases) return tell(known_to(state, lane), own_steps(warp, state, lane), scope);
  const auto it = beside_.find(thread_key(warp, lane));
  if (it == beside_.end()) return;
  for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys})
    if (const Known& known = it->second.fenced[index_of(fence)]; !known->empty())
      tell(known, {}, std::min(fence, scope));
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
  out.word = (reinterpret_cast<uint64_t>(address) - memory_->heaps[static_cast<size_t>(owner)]) / 8;
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

Known HappensBefore::all_told() { return join(memory_->everything(), signalled_); }

// A counter of this rank's own threads, such as one that gives out work, passes on nothing of other ranks.
Known HappensBefore::told_by_word(uint64_t offset) {
  if (!follows_ranks_ || memory_->touched(offset)) return all_told();
  memory_->receive(signalled_);
  const auto it = memory_->words.find(offset / 8);
  return it == memory_->words.end() ? memory_->any
                                    : join(memory_->any, it->second.guaranteed({true, false, 0}, 0, start_));
}

} // namespace sim
} // namespace tsn
