#include "happens_before.h"

#include "rules.h"
#include "tilescale_net/device/add_mailbox.h"
#include "tilescale_net/device/context.h"

namespace tsn::sim {

std::string primitive_name(uint32_t operation, uint32_t scope) {
  std::string name = std::string("N.") + kOperationNames[operation];
  if (operation == kOpFlush) return name + "_async";
  if (operation == kOpBarrier) return name + "_all";
  if (operation == kOpWait) return name + (scope == 0 ? "" : scope == 1 ? "_warp" : "_block");
  if (operation != kOpPut && operation != kOpGet && operation != kOpPutSignal) return name;
  return name + (scope == 0 ? "_thread" : scope == 1 ? "_warp" : "_block");
}

std::string primitive_name(uint32_t operation, uint32_t scope, const std::vector<std::string>& names, int line) {
  const std::string typed = entry_at(names, line);
  return typed.empty() ? primitive_name(operation, scope) : typed;
}

HappensBefore::HappensBefore(unsigned warps_per_block, const std::vector<std::string>& lines,
                             const std::vector<std::string>& names, RaceMemory* memory, bool follows_ranks)
    : warps_per_block_(warps_per_block), lines_(lines), names_(names), memory_(memory),
      follows_ranks_(memory && follows_ranks), start_(nothing_known()), first_epoch_(take_epoch()),
      latest_(first_epoch_), signalled_(nothing_known()), lanes_(follows_ranks) {
  if (!memory_) return;
  auto start = std::make_shared<Clock>();
  // Earlier launches have ended, and may have left puts in flight.
  const size_t me = static_cast<size_t>(memory_->me);
  memory_->ended[me] = first_epoch_ - 1;
  for (int r = 0; r < memory_->ranks(); ++r)
    start->emplace_back(clock_key(Part::all, r), r == memory_->me ? memory_->flushed : memory_->ended[r]);
  start->emplace_back(clock_key(Part::ended, memory_->me), memory_->ended[me]);
  if (follows_ranks_)
    memory_->receive(memory_->me,
                     nothing_known()); // the current state belongs to operations that the host has waited for
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
  // Launches of a rank are serial: the next one knows all that this one's warps have learnt of other ranks.
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
  return concat(name(event), call.add ? " adds to" : " sets", " the signal word at heap offset ",
                memory_ ? memory_->offset(call.signal) : 0, " of PE ", call.pe, ", which ", name(first.event),
                first.add ? " adds to" : " sets", ": one word is either set or added to; use two words");
}

std::string HappensBefore::stored_plainly(const Event& event, const uint64_t* word) const {
  if (!memory_ || !memory_->holds(word)) return "";
  const uint64_t offset = memory_->offset(word);
  for (uint64_t i = offset / 4; i < offset / 4 + 2; ++i) {
    const Stamp stamp = memory_->stores(memory_->me).words[i];
    const bool own = stamp < kParting && touch_of(stamp) == Touch::access && rank_of_stamp(stamp) == memory_->me &&
                     !is_signal(stamp) && !(stamp & kAtomicStamp);
    if (own && stamp >> 32 >= first_epoch_)
      return concat(name(event), " waits for the signal word at heap offset ", offset, ", to which ",
                    place(static_cast<uint32_t>(stamp >> 8 & 0xffff)),
                    " stores in the same kernel: signal words are changed by signals only; zero them on the host");
  }
  return "";
}

// All that meet in a barrier know this rank's work so far.
void HappensBefore::enter_barrier(const Actor& actor, unsigned lane) {
  if (!follows_ranks_) signalled_ = join(signalled_, with_own(actor.warp, at(actor.warp), lane));
  for (int pe = 0; follows_ranks_ && pe < memory_->ranks(); ++pe)
    if (!memory_->heaps[pe]) memory_->send(pe, message(actor.warp, actor.lane(), pe, nullptr, false, 0));
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
  const bool far =
      memory_ && call.pe >= 0 && call.pe < memory_->ranks() && !memory_->heaps[call.pe]; // reached by the proxy
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
      Message sent = message(actor.warp, actor.lane(), call.pe, call.signal, call.add, carried);
      sent.value = call.value;
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
  // The puts completed by an earlier launch's flush are not recorded: assume all.
  const Known done =
      it == flushes_.end() ? std::make_shared<Clock>(Clock{{memory_->all_done(), memory_->own().latest}}) : it->second;
  learn(at(warp), lane, join(known_to(at(warp), lane), done));
}

// An error of a wait for an exact value of a word that may change before the wait sees it; or nothing.
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
    return concat(name(event), " waits until the signal word at heap offset ", memory_->offset(signal), " is ", value,
                  " exactly, and nothing orders the wait before a signal by which it may go on to another value: then "
                  "it never ends; wait for at least (\"ge\") the value");
  }
  return "";
}

std::string HappensBefore::end() const {
  if (const std::string wrong = passed(); !wrong.empty()) return wrong;
  for (const auto& entry : puts_)
    for (const Put& put : entry.second)
      if (put.beside)
        return concat(name(put.event), " to PE ", put.event.pe,
                      " comes before no fence or quiet: nothing orders it before ", name(put.fence),
                      "; T.sync_threads() or another synchronisation is missing between them");
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
  return concat("block ", warp / warps_per_block_, " warp ", warp % warps_per_block_);
}

std::string HappensBefore::name(const Event& event) const {
  return primitive_name(event.operation, event.scope, names_, event.line) + " of " + place(event.warp) +
         line(event.line);
}

// --- knowledge of threads about each other: which puts are complete, by fences and quiets, and for which ranks by
// signals; and words of memory that propagate it, by loads, stores and atomic operations with an order and a scope,
// and by fences beside unordered ones.
//
// As in PTX: a thread that acquires a word after another has released it knows all that that thread knew, if the
// scope of each includes the other: a block, a rank, all ranks. A relaxed access propagates nothing, unless its
// thread has a fence before a write, or after a read; then the narrower of the two scopes counts.

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
  // Puts of earlier launches come before it.
  for (const auto& [by, epoch] : memory_->put_epochs)
    if (concerns(by.second)) add(*before, by, 0, epoch);
  for (const auto& [by, epoch] : memory_->thread_epochs)
    if (concerns(by.second)) add(*before, by, kAllLanes, epoch);
  // A put by a whole warp takes all of its lanes.
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

Message HappensBefore::message(uint32_t warp, unsigned lane, int pe, const uint64_t* signal, bool add,
                               uint32_t put_epoch) {
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
  out.add = add;
  out.carried = put_epoch;
  if (add && !put_epoch) { // a quiet or a wait shows its arrival, too
    out.carried = state.epoch;
    note_thread_put({warp, state.epoch, pe, -1, kOpSignal, 0, lane});
  }
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
                                Ordering ordering, Written written, bool late, bool polls) {
  const uint32_t warp = actor.warp;
  const unsigned lane = actor.lane();
  State& state = at(warp);
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const bool reads = access != WordAccess::write && !polls, writes = access != WordAccess::read;
  bool shared = false; // with other ranks
  int owner = -1;      // of the heap that contains it
  Known of_others = nothing_known();
  std::string wrong;
  if (memory_) {
    const uint64_t offset = memory_->offset(address);
    // A thread that finds an entry of a mailbox applies a proxy's deferred add; this orders no threads.
    if (offset >= kMailboxBegin && offset < kMailboxEnd) return "";
    owner = memory_->holds(address) ? memory_->me : memory_->owner(address);
    shared = owner >= 0 && (owner != memory_->me || offset >= kSystemBytes);
    if (shared) {
      const uint64_t base = owner == memory_->me ? memory_->base : memory_->heaps[owner];
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
    known = acquired_as(warp, lane, ordering, acquired);
  }
  if (writes) release(warp, lane, address, ordering, shared, owner, written, late && memory_ && owner != memory_->me);
  // Polls that learn nothing leave no trace, however many there are.
  if (known != before || (writes && ordering.releases)) learn(state, lane, std::move(known));
  return wrong;
}

template <typename F>
Known HappensBefore::acquired_as(uint32_t warp, unsigned lane, Ordering ordering, F acquired) {
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const Known& before = known_to(at(warp), lane);
  if (ordering.acquires) return join_again(before, acquired(scope));
  Beside& beside = beside_[thread_key(warp, lane)];
  for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys})
    beside.found[index_of(fence)] = join(beside.found[index_of(fence)], acquired(std::min(fence, scope)));
  return before;
}

void HappensBefore::polled(const Actor& actor, const Polled& load, Ends ends) {
  const uint32_t warp = actor.warp, block = warp / warps_per_block_;
  const unsigned lane = actor.lane();
  State& state = at(warp);
  const Known before = with_own(warp, state, lane);
  const int owner = !memory_ ? -1 : memory_->holds(load.address) ? memory_->me : memory_->owner(load.address);
  const bool shared = owner >= 0 && static_cast<MemScope>(load.ordering.scope) == MemScope::sys;
  const int64_t now = load.value(ends);
  const Known of_others = shared ? polled_by_word(owner, load, ends, before) : nothing_known();
  const auto found = words_.find(load.address);
  if (found == words_.end() && of_others->empty()) return;
  const auto acquired = [&](MemScope by) {
    if (found == words_.end()) return of_others;
    const Known all = found->second.acquired(block, by);
    const Known here =
        by == MemScope::cta ? all : found->second.steps.guaranteed({false, false, 0, &ends}, now, before, all);
    return by == MemScope::sys ? join(here, of_others) : here;
  };
  Known known = acquired_as(warp, lane, load.ordering, acquired);
  if (known != known_to(state, lane)) learn(state, lane, std::move(known));
}

int64_t Polled::value(const Ends& ends) const {
  const int64_t now = bytes == 4 ? __atomic_load_n(static_cast<const int32_t*>(address), __ATOMIC_ACQUIRE)
                                 : __atomic_load_n(static_cast<const int64_t*>(address), __ATOMIC_ACQUIRE);
  return ends.ends(ends.condition, now) ? now : found;
}

void HappensBefore::release(uint32_t warp, unsigned lane, const void* address, Ordering ordering, bool shared,
                            int owner, Written written, bool late) {
  const MemScope scope = static_cast<MemScope>(ordering.scope);
  const uint32_t block = warp / warps_per_block_;
  const auto leave = [&](const Known& known, const Clock& own, MemScope to) {
    words_[address].learn(known, own, block, to);
    if (!shared || to != MemScope::sys) return;
    signalled_ = join(signalled_, known), join_in_place(signalled_, own);
    if (follows_ranks_)
      memory_->send(owner, left_in(warp, lane, owner, address,
                                   own.empty() ? known : join(known, std::make_shared<Clock>(own)), written, late));
  };
  const int me = memory_ ? memory_->me : 0;
  const auto step = [&](const Known& known, Clock own, uint32_t epoch, bool narrow) {
    SignalHistory& steps = words_[address].steps;
    if (narrow || written.how == Written::other) return steps.lose();
    if (written.how == Written::set) steps.find(written.before);
    steps.add({me, warp, lane, epoch, written.value, known, std::move(own), 0, 0, 0}, written.how == Written::add);
  };
  const State& state = at(warp);
  if (ordering.releases) {
    const Known& known = known_to(state, lane);
    const Clock own = own_steps(warp, state, lane);
    leave(known, own, scope);
    return step(known, own, state.epoch, scope == MemScope::cta);
  }
  const auto it = beside_.find(thread_key(warp, lane));
  if (it == beside_.end()) return;
  Known all = nothing_known();
  bool narrow = scope == MemScope::cta;
  for (const MemScope fence : {MemScope::cta, MemScope::gpu, MemScope::sys}) {
    const Known& known = it->second.fenced[index_of(fence)];
    if (known->empty()) continue;
    leave(known, {}, std::min(fence, scope));
    all = join(all, known);
    narrow = narrow || fence == MemScope::cta;
  }
  if (!all->empty()) step(all, {}, steps_known(all, me, warp, lane), narrow);
}

void HappensBefore::fenced(uint32_t warp, unsigned lane, MemScope scope) {
  State& state = at(warp);
  Beside& beside = beside_[thread_key(warp, lane)];
  const Known& found = beside.found[index_of(scope)];
  beside.fenced[index_of(scope)] = join(with_own(warp, state, lane), found);
  learn(state, lane, join(known_to(state, lane), found));
}

bool HappensBefore::leaves(uint32_t warp, unsigned lane, const void* word, Written written, Message* out) {
  const auto it = beside_.find(thread_key(warp, lane));
  const int owner = memory_->owner(word);
  if (it == beside_.end() || owner < 0) return false;
  const Known& known = it->second.fenced[index_of(MemScope::sys)];
  if (known->empty()) return false;
  signalled_ = join(signalled_, known);
  *out = left_in(warp, lane, owner, word, known, written, true);
  return true;
}

// As in CUDA, earlier stores through views and atomic operations are complete as well.
Message HappensBefore::left_in(uint32_t warp, unsigned lane, int owner, const void* address, const Known& known,
                               Written written, bool late) {
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
  const uint64_t base = owner == memory_->me ? memory_->base : memory_->heaps[owner];
  out.word = (reinterpret_cast<uint64_t>(address) - base) / 8;
  out.byte = static_cast<uint8_t>((reinterpret_cast<uint64_t>(address) - base) % 8);
  out.rank = memory_->me;
  out.warp = warp;
  out.lane = lane;
  out.epoch = steps_known(known, memory_->me, warp, lane);
  out.carried = late ? at(warp).epoch : 0;
  out.pe = owner;
  out.value = static_cast<uint64_t>(written.value);
  out.add = written.how == Written::add;
  out.known = written.how != Written::other;
  out.before = written.before;
  out.left = true;
  out.everything = left.sent->size() > kMaxCarried;
  if (!out.everything) {
    out.entries = static_cast<uint32_t>(left.sent->size());
    out.at = memory_->publish(left.sent);
  }
  return out;
}

// A counter of this rank's own threads, such as a work queue's, propagates nothing of other ranks.
Known HappensBefore::acquired_by_word(int rank, uint64_t offset) {
  if (!follows_ranks_) return join(memory_->everything(), signalled_);
  const Inbox& inbox = memory_->receive(rank, signalled_);
  const auto it = inbox.words.find(offset / 8);
  return it == inbox.words.end() ? inbox.any : join(inbox.any, it->second.all());
}

Known HappensBefore::polled_by_word(int rank, const Polled& load, const Ends& ends, const Known& before) {
  const uint64_t base = rank == memory_->me ? memory_->base : memory_->heaps[rank];
  const uint64_t offset = address_of(load.address) - base;
  if (!follows_ranks_) return acquired_by_word(rank, offset);
  int64_t now = load.value(ends);
  const Inbox* inbox = &memory_->receive(rank, signalled_);
  // A message comes before its word changes: repeat until all messages of the value are there.
  for (int64_t later = load.value(ends); later != now; later = load.value(ends))
    now = later, inbox = &memory_->receive(rank, signalled_);
  const auto word = inbox->words.find(offset / 8);
  if (word == inbox->words.end()) return inbox->any;
  const auto left = inbox->left.find(offset);
  const Known& all = word->second.all();
  const Seen seen{false, false, 0, &ends};
  Known known = all;
  if (left == inbox->left.end()) known = word->second.guaranteed(seen, now, before, all);
  else if (!word->second.of_signals()) known = left->second.guaranteed(seen, now, before, all);
  return join(inbox->any, known);
}

} // namespace tsn::sim
