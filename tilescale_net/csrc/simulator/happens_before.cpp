#include "happens_before.h"

#include "rules.h"

#include "tilescale_net/device/context.h"

#include <algorithm>

namespace tsn {
namespace sim {

std::string primitive_name(uint32_t operation, uint32_t scope) {
  std::string name = std::string("N.") + kOperationNames[operation];
  if (operation == kOpFlush) return name + "_async";
  if (operation == kOpBarrier) return name + "_all";
  if (operation == kOpWait) return name + (scope == 0 ? "" : scope == 1 ? "_warp" : "_block");
  if (operation != kOpPut && operation != kOpGet && operation != kOpPutSignal) return name;
  return name + (scope == 0 ? "_thread" : scope == 1 ? "_warp" : "_block");
}

std::string primitive_name(uint32_t operation, uint32_t scope, const std::vector<std::string>& names, int line) {
  const bool typed = line >= 0 && static_cast<size_t>(line) < names.size() && !names[static_cast<size_t>(line)].empty();
  return typed ? names[static_cast<size_t>(line)] : primitive_name(operation, scope);
}

HappensBefore::HappensBefore(unsigned warps_per_block, const std::vector<std::string>& lines,
                             const std::vector<std::string>& names, RaceMemory* memory, bool follows_ranks)
    : warps_per_block_(warps_per_block), lines_(lines), names_(names), memory_(memory),
      follows_ranks_(memory && follows_ranks), start_(nothing_known()), first_epoch_(take_epoch()),
      latest_(first_epoch_), signalled_(nothing_known()), lanes_(follows_ranks) {
  if (!memory_) return;
  auto start = std::make_shared<Clock>();
  // The launches before this one have ended, and may have left puts on their way.
  const size_t me = static_cast<size_t>(memory_->me);
  memory_->ended[me] = first_epoch_ - 1;
  for (int r = 0; r < memory_->ranks(); ++r)
    start->emplace_back(clock_key(Part::all, r),
                        r == memory_->me ? memory_->flushed : memory_->ended[static_cast<size_t>(r)]);
  start->emplace_back(clock_key(Part::ended, memory_->me), memory_->ended[me]);
  if (follows_ranks_)
    memory_->receive(memory_->me, nothing_known()); // what is there now belongs to what the host has waited for
  memory_->forget_finished();
  start_ = join(start, memory_->learnt);
  sites_.push_back(0);
  for (const std::string& line : lines_) {
    const uint32_t number = line.empty() ? kSites : memory_->site("(" + line + ")");
    sites_.push_back(number < kSites ? static_cast<Site>(number + 1) : 0);
  }
  Page& page = memory_->own();
  page.warps_per_block = warps_per_block_;
  __atomic_store_n(&page.latest, latest_, __ATOMIC_RELEASE);
}

HappensBefore::~HappensBefore() {
  give_epoch(latest_);
  if (!memory_) return;
  // Launches of a rank follow one another: the next one knows what the warps of this one have learnt of other ranks.
  for (const auto& entry : warps_) {
    memory_->learnt = join(memory_->learnt, entry.second.known);
    for (unsigned lane = 0; entry.second.lanes && lane < kEveryLane; ++lane)
      memory_->learnt = join(memory_->learnt, known_to(entry.second, lane));
  }
  memory_->learnt = without_lanes(memory_->learnt);
  for (const auto& [by, epoch] : put_epochs_) memory_->put_epochs[by] = epoch;
  for (const auto& [by, epoch] : thread_epochs_) memory_->thread_epochs[by] = epoch;
  __atomic_store_n(&memory_->own().finished, latest_, __ATOMIC_RELEASE);
}

HappensBefore::State& HappensBefore::at(uint32_t warp) {
  State& state = warps_[warp];
  if (!state.known) {
    state.known = start_;
    state.epoch = first_epoch_;
  }
  return state;
}

void HappensBefore::turn(State& state, Known known) {
  if (++state.epoch > latest_) {
    latest_ = state.epoch;
    if (memory_) __atomic_store_n(&memory_->own().latest, latest_, __ATOMIC_RELEASE);
  }
  state.known = std::move(known);
}

const Known& HappensBefore::known_to(const State& state, unsigned lane) const {
  return state.lanes && lane < kEveryLane && state.lanes[lane] ? state.lanes[lane] : state.known;
}

Clock HappensBefore::own_steps(uint32_t warp, const State& state, unsigned lane) const {
  const int me = memory_ ? memory_->me : 0;
  if (!lanes_ || lane == kEveryLane) return {{steps_key(me, warp), state.epoch}};
  if (!state.floor) return {{steps_key(me, warp, lane), state.epoch}};
  return {{steps_key(me, warp), state.floor}, {steps_key(me, warp, lane), state.epoch}};
}

Known HappensBefore::with_own(uint32_t warp, const State& state, unsigned lane) const {
  return join(known_to(state, lane), std::make_shared<Clock>(own_steps(warp, state, lane)));
}

Known HappensBefore::join_again(const Known& a, const Known& b) {
  for (const Joined& done : joined_)
    if (done.a == a && done.b == b) return done.both;
  Joined& made = joined_[next_joined_++ % joined_.size()];
  return (made = {a, b, join(a, b)}).both;
}

void HappensBefore::learn(State& state, unsigned lane, Known known) {
  if (!lanes_ || lane == kEveryLane) return turn(state, std::move(known));
  if (known != known_to(state, lane)) {
    if (!state.lanes) state.lanes.reset(new Known[kEveryLane]);
    state.lanes[lane] = std::move(known);
  }
  turn(state, state.known);
}

uint32_t HappensBefore::known_steps(uint32_t warp, unsigned lane, uint32_t by, unsigned by_lane) {
  const State& state = at(warp);
  const uint32_t known = steps_known(known_to(state, lane), memory_ ? memory_->me : 0, by, by_lane);
  return by == warp ? std::max(known, state.floor) : known;
}

void HappensBefore::meet(const std::vector<uint32_t>& warps) {
  auto own = std::make_shared<Clock>();
  Known all = start_;
  uint32_t last = 0;
  for (uint32_t warp : warps) {
    State& state = at(warp);
    last = std::max(last, state.epoch);
    own->emplace_back(steps_key(memory_ ? memory_->me : 0, warp), state.epoch);
    all = join(all, state.known);
    for (unsigned lane = 0; state.lanes && lane < kEveryLane; ++lane) all = join(all, known_to(state, lane));
    state.lanes.reset();
  }
  std::sort(own->begin(), own->end());
  all = without_lanes(join(all, own));
  for (uint32_t warp : warps) {
    at(warp).epoch = at(warp).floor = last; // one for all, see block_puts_
    turn(at(warp), all);
  }
}

void HappensBefore::lanes_meet(uint32_t warp, uint32_t mask, bool all) {
  State& state = at(warp);
  Known joined = state.known;
  auto own = std::make_shared<Clock>();
  for (unsigned lane = 0; lane < kEveryLane; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (state.lanes) joined = join(joined, known_to(state, lane));
    if (!all) own->emplace_back(steps_key(memory_ ? memory_->me : 0, warp, lane), state.epoch);
  }
  if (all) {
    state.lanes.reset();
    state.floor = state.epoch;
    return turn(state, joined);
  }
  if (!state.lanes) state.lanes.reset(new Known[kEveryLane]);
  joined = join(joined, own);
  for (unsigned lane = 0; lane < kEveryLane; ++lane)
    if (mask >> lane & 1) state.lanes[lane] = joined;
  turn(state, state.known);
}

void HappensBefore::meets_for(const std::vector<uint32_t>& warps, const Call& call, int line) {
  if ((call.operation != kOpPut && call.operation != kOpPutSignal) || warps.size() < 2) return;
  const uint32_t leader = warps.front();
  const Event event{leader, at(leader).epoch, call.pe, line, call.operation, call.scope};
  block_puts_[leader] = event.epoch;
  Put put = made_put(event); // all know the same fences
  for (uint32_t warp : warps) {
    put.event.warp = warp;
    if (call.operation == kOpPut) add_put(put);
    else if (follows_ranks_) put_epochs_[{warp, event.pe}] = event.epoch;
  }
}

void HappensBefore::waited(uint32_t warp, unsigned lane, int line, const uint64_t* signal, const Seen& seen) {
  State& state = at(warp);
  const Known before = known_to(state, lane);
  Known known = before;
  if (follows_ranks_) {
    const int64_t now = static_cast<int64_t>(__atomic_load_n(signal, __ATOMIC_ACQUIRE));
    const Inbox& inbox = memory_->receive(memory_->me, signalled_);
    known = join(known, inbox.any);
    const auto it = inbox.words.find(memory_->offset(signal) / 8);
    const bool has_signals = it != inbox.words.end();
    if (seen.exactly && exact_.size() == kMaxExactWaits) more_exact_ = true;
    else if (seen.exactly)
      exact_.push_back({signal, Event{warp, state.epoch, -1, line, kOpWait, 0, lane}, seen.value,
                        has_signals ? it->second.reached(seen, before) : 0});
    if (has_signals) known = join(known, it->second.guaranteed(seen, now, before));
  } else {
    known = join(known, signalled_); // any of it may have led to the signal
  }
  if (known != before) learn(state, lane, known);
}

bool HappensBefore::comes_before(const Event& event, uint32_t warp, unsigned lane) {
  if (event.warp == warp && (!lanes_ || lane == kEveryLane || event.lane == lane)) return true;
  return known_steps(warp, lane, event.warp, lanes_ ? event.lane : kEveryLane) >= event.epoch;
}

std::string HappensBefore::use(const Event& event, const Call& call) {
  const auto made = uses_.try_emplace({call.signal, call.pe}, Use{event, call.add});
  const Use& first = made.first->second;
  if (first.add == call.add) return "";
  return name(event) + (call.add ? " adds to" : " sets") + " the signal word at heap offset " +
         std::to_string(memory_ ? memory_->offset(call.signal) : 0) + " of PE " + std::to_string(call.pe) + ", which " +
         name(first.event) + (first.add ? " adds to" : " sets") + ": one word is either set or added to; use two words";
}

std::string HappensBefore::stored_plainly(const Event& event, const uint64_t* word) const {
  if (!memory_ || !memory_->holds(word)) return "";
  const uint64_t offset = memory_->offset(word);
  for (uint64_t i = offset / 4; i < offset / 4 + 2; ++i) {
    const Stamp stamp = memory_->stores(memory_->me).words[i];
    const bool own = stamp < kParting && touch_of(stamp) == Touch::access && rank_of_stamp(stamp) == memory_->me &&
                     !is_signal(stamp) && !(stamp & kAtomicStamp);
    if (own && stamp >> 32 >= first_epoch_)
      return name(event) + " waits for the signal word at heap offset " + std::to_string(offset) + ", to which " +
             place(static_cast<uint32_t>(stamp >> 8 & 0xffff)) +
             " stores in the same kernel: signal words are changed by signals only; zero them on the host";
  }
  return "";
}

// What this rank has done so far is known to all that are met in a barrier.
void HappensBefore::enter_barrier(const Actor& actor, unsigned lane) {
  if (!follows_ranks_) signalled_ = join(signalled_, with_own(actor.warp, at(actor.warp), lane));
  for (int pe = 0; follows_ranks_ && pe < memory_->ranks(); ++pe)
    if (!memory_->heaps[static_cast<size_t>(pe)]) memory_->send(pe, message(actor.warp, actor.lane(), pe, nullptr, 0));
  turn(at(actor.warp), at(actor.warp).known);
}

std::string HappensBefore::begin(const Actor& actor, const Call& call, bool done) {
  const bool alone = lanes_ && call.scope == 0;
  const unsigned lane = alone ? actor.lane() : kEveryLane;
  Event event{actor.warp, at(actor.warp).epoch, call.pe, actor.line, call.operation, call.scope, lane};
  const bool puts = call.operation == kOpPut || call.operation == kOpPutSignal;
  const auto together = puts ? block_puts_.find(actor.warp) : block_puts_.end();
  const bool of_block = together != block_puts_.end();
  if (of_block) event.epoch = together->second;
  const bool far = memory_ && call.pe >= 0 && call.pe < memory_->ranks() &&
                   !memory_->heaps[static_cast<size_t>(call.pe)]; // reached by the proxy
  std::string wrong;
  switch (call.operation) {
  case kOpPut:
  case kOpPutValue:
    wrong = transfer(actor, event, call, of_block ? warps_per_block_ : 1);
    if (of_block) block_puts_.erase(together);
    else add_put(made_put(event));
    break;
  case kOpGet:
    wrong = transfer(actor, event, call, 1);
    break;
  case kOpAtomic:
    wrong = atomic(actor, event, call, done);
    break;
  case kOpPutSignal:
    wrong = transfer(actor, event, call, of_block ? warps_per_block_ : 1);
    if (of_block) block_puts_.erase(together);
    else if (alone) note_thread_put(event);
    else put_epochs_[{event.warp, event.pe}] = event.epoch;
    [[fallthrough]];
  case kOpSignal:
    if (wrong.empty()) wrong = use(event, call);
    if (wrong.empty()) wrong = changed_word(actor, event, call);
    if (!follows_ranks_) {
      signalled_ = join(signalled_, with_own(actor.warp, at(actor.warp), lane));
      turn(at(actor.warp), at(actor.warp).known);
    } else if (far) {
      const uint32_t carried = call.operation == kOpPutSignal ? event.epoch : 0;
      Message sent = message(actor.warp, actor.lane(), call.pe, call.signal, carried);
      sent.value = call.value;
      sent.add = call.add;
      memory_->send(call.pe, sent);
    }
    break;
  case kOpBarrier:
    enter_barrier(actor, lane);
    break;
  case kOpFence:
  case kOpQuiet:
    cover(event);
    learn(at(actor.warp), lane, completed(event, call.operation == kOpFence ? Part::fenced : Part::done));
    break;
  case kOpFlush:
    cover(event);
    begun_flushes_[thread_key(event.warp, lane)] = completed(event, Part::done);
    break;
  case kOpWait:
  case kOpTest:
    wrong = stored_plainly(event, call.signal);
    waits_.try_emplace(call.signal, event);
    break;
  default:
    break;
  }
  return wrong;
}

void HappensBefore::flushed(uint32_t warp, unsigned lane, uint64_t ticket, bool ended) {
  if (!follows_ranks_) return;
  const auto it = flushes_.find(ticket);
  if (!ended) {
    // Flushes of the direct path share their ticket.
    const Known& begun = begun_flushes_[thread_key(warp, lane)];
    flushes_[ticket] = it == flushes_.end() ? begun : join(it->second, begun);
    return;
  }
  // What a flush of an earlier launch has completed is not kept: all.
  const Known done =
      it == flushes_.end() ? std::make_shared<Clock>(Clock{{memory_->all_done(), memory_->own().latest}}) : it->second;
  learn(at(warp), lane, join(known_to(at(warp), lane), done));
}

// A wait for a value exactly, of a word that may go on to another value before the wait has seen it; or nothing.
std::string HappensBefore::passed() const {
  if (exact_.empty()) return "";
  std::vector<int64_t> now;
  for (const Exact& wait : exact_) now.push_back(static_cast<int64_t>(__atomic_load_n(wait.signal, __ATOMIC_ACQUIRE)));
  const Inbox& inbox = memory_->receive(memory_->me, signalled_);
  for (size_t i = 0; i < exact_.size(); ++i) {
    const auto& [signal, event, value, reached] = exact_[i];
    const auto it = inbox.words.find(memory_->offset(signal) / 8);
    const bool has_signals = it != inbox.words.end();
    if (!has_signals || !it->second.passes(value, reached, now[i], memory_->me, event.warp, event.lane, event.epoch))
      continue;
    return name(event) + " waits until the signal word at heap offset " + std::to_string(memory_->offset(signal)) +
           " is " + std::to_string(value) +
           " exactly, and nothing orders the wait before a signal by which it may go on to another value: then it "
           "never ends; wait for at least (\"ge\") the value";
  }
  return "";
}

std::string HappensBefore::end() const {
  if (const std::string wrong = passed(); !wrong.empty()) return wrong;
  for (const auto& entry : puts_)
    for (const Put& put : entry.second)
      if (put.beside)
        return name(put.event) + " to PE " + std::to_string(put.event.pe) +
               " comes before no fence or quiet: nothing orders it before " + name(put.fence) +
               "; T.sync_threads() or another synchronisation is missing between them";
  for (const auto& entry : waits_) {
    const std::string wrong = stored_plainly(entry.second, entry.first);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

void HappensBefore::add_gaps(std::set<std::string>& gaps) const {
  if (more_puts_) gaps.insert(gap_text(Gap::puts));
  if (more_exact_) gaps.insert(gap_text(Gap::exact_waits));
}

std::string HappensBefore::place(uint32_t warp) const {
  return "block " + std::to_string(warp / warps_per_block_) + " warp " + std::to_string(warp % warps_per_block_);
}

std::string HappensBefore::line(int number) const {
  if (number < 0 || static_cast<size_t>(number) >= lines_.size()) return "";
  return " (" + lines_[static_cast<size_t>(number)] + ")";
}

std::string HappensBefore::name(const Event& event) const {
  return primitive_name(event.operation, event.scope, names_, event.line) + " of " + place(event.warp) +
         line(event.line);
}

} // namespace sim
} // namespace tsn
