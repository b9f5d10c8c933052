#include "race_memory.h"

#include <sched.h>

namespace tsn::sim {

namespace {
std::map<uint64_t, RaceMemory> memories; // by the base of the heap
uint32_t next_epoch = 1;                 // of this process
constexpr size_t kMaxCached = 4096;
// Time to wait for an incomplete message: its rank may have no processor, or have been killed. No deadline ends this,
// and a round of a busy machine may take as long as many of an idle one.
constexpr std::chrono::milliseconds kPatience{500};

template <typename T>
T seen(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

// Waits for progress of another rank; see kPatience.
template <typename F>
void wait_for(F done) {
  if (done()) return;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!done() && std::chrono::steady_clock::now() < end) sched_yield();
}
} // namespace

uint64_t race_memory_bytes(uint64_t heap_bytes) {
  return sizeof(Page) + (heap_bytes / 4 + heap_bytes) * 2 * (sizeof(Stamp) + sizeof(Site));
}

// Behind the page: stamps by 4 bytes, of stores and of loads, their sites, and the same by byte, for which the system
// allocates only touched pages.
Shadow RaceMemory::stores(int rank) const {
  Shadow s;
  s.words = reinterpret_cast<Stamp*>(pages[rank] + 1);
  s.word_sites = reinterpret_cast<Site*>(s.words + bytes / 4 * 2);
  s.bytes = reinterpret_cast<Stamp*>(s.word_sites + bytes / 4 * 2);
  s.byte_sites = reinterpret_cast<Site*>(s.bytes + bytes * 2);
  return s;
}
Shadow RaceMemory::loads(int rank) const {
  const Shadow s = stores(rank);
  return {{s.words + bytes / 4, s.word_sites + bytes / 4, s.bytes + bytes, s.byte_sites + bytes}};
}

void Shadow::part(uint64_t word) const {
  Stamp stamp = seen(words[word]);
  while (stamp < kParting &&
         !__atomic_compare_exchange_n(words + word, &stamp, kParting, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  if (stamp >= kParting) return wait_for([&] { return seen(words[word]) != kParting; }); // by another rank
  for (uint64_t at = word * 4; at < word * 4 + 4; ++at) {
    __atomic_store_n(bytes + at, stamp, __ATOMIC_RELAXED);
    byte_sites[at] = word_sites[word];
  }
  __atomic_store_n(words + word, kByBytes, __ATOMIC_RELEASE);
}

int RaceMemory::owner(const void* p) const {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  for (size_t r = 0; r < heaps.size(); ++r)
    if (heaps[r] && at - heaps[r] < bytes) return static_cast<int>(r);
  return -1;
}

void RaceMemory::peer_range(uint64_t* begin, uint64_t* size) const {
  uint64_t first = ~0ull, end = 0;
  for (size_t r = 0; r < heaps.size(); ++r) {
    if (!heaps[r] || static_cast<int>(r) == me) continue;
    first = std::min(first, heaps[r]);
    end = std::max(end, heaps[r] + bytes);
  }
  *begin = first;
  *size = end > first ? end - first : 0;
}

Known RaceMemory::everything() const {
  auto out = std::make_shared<Clock>();
  for (int r = 0; r < ranks(); ++r)
    if (r != me) out->emplace_back(clock_key(Part::all, r), seen(pages[r]->latest));
  out->emplace_back(all_done(), seen(own().latest));
  return out;
}

uint64_t RaceMemory::publish(const Known& known) {
  if (published.size() > kMaxCached) published.clear();
  const auto made = published.try_emplace(known.get(), known, 0);
  Page& page = own();
  const bool there = !made.second && page.entries - made.first->second.second < kEntries / 2;
  if (there || known->size() > kEntries / 4) return made.first->second.second;
  const uint64_t at = page.entries;
  // Readers check the count after they have read: entries older than the last kEntries are void.
  __atomic_store_n(&page.entries, at + known->size(), __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (size_t i = 0; i < known->size(); ++i) page.known[(at + i) % kEntries] = {(*known)[i].first, (*known)[i].second};
  made.first->second.second = at;
  return at;
}

uint32_t RaceMemory::site(const std::string& name) {
  const auto it = sites.find(name);
  if (it != sites.end()) return it->second;
  Page& page = own();
  if (page.sites == kSites) return kSites;
  const uint32_t number = page.sites++;
  strncpy(page.names[number], name.c_str(), sizeof page.names[number] - 1);
  return sites[name] = number;
}

bool RaceMemory::find(int rank, uint64_t number, Transfer* out) const {
  const Transfer& there = pages[rank]->transfer[number % kTransfers];
  if (seen(there.number) != number) return false;
  *out = there;
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return seen(there.number) == number;
}

bool RaceMemory::is_atomic(Stamp stamp) const {
  Transfer t;
  if (touch_of(stamp) == Touch::access) return stamp & kAtomicStamp;
  return touch_of(stamp) == Touch::put && find(rank_of_stamp(stamp), stamp >> 8, &t) && t.atomic;
}

void RaceMemory::send(int pe, Message message) {
  Page& page = *pages[pe];
  const uint64_t turn = __atomic_fetch_add(&page.messages, 1, __ATOMIC_ACQ_REL);
  Message& to = page.message[turn % kMessages];
  __atomic_store_n(&to.turn, 0, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  message.turn = 0;
  to = message;
  __atomic_store_n(&to.turn, turn + 1, __ATOMIC_RELEASE);
}

void RaceMemory::leave_unknown(const void* word) {
  const int rank = owner(word);
  if (rank < 0 || rank == me) return;
  Message message{};
  message.word = (reinterpret_cast<uint64_t>(word) - heaps[rank]) / 8;
  message.rank = me;
  message.pe = rank;
  message.left = message.everything = true;
  send(rank, message);
}

Known RaceMemory::fetch(const Message& m) {
  if (!m.entries) return nothing_known();
  if (fetched.size() > kMaxCached) fetched.clear();
  Known& there = fetched[{m.rank, m.at}];
  if (there) return there;
  const Page& page = *pages[m.rank];
  auto read = std::make_shared<Clock>();
  for (uint64_t i = 0; i < m.entries; ++i) {
    const Entry& entry = page.known[(m.at + i) % kEntries];
    read->emplace_back(entry.key, static_cast<uint32_t>(entry.epoch));
  }
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  if (seen(page.entries) - m.at > kEntries) return nullptr;
  return there = read;
}

Inbox& RaceMemory::receive(int rank, const Known& own_signals) {
  Inbox& inbox = inboxes[rank];
  auto& [read, words, left, any] = inbox;
  const Page& page = *pages[rank];
  const uint64_t end = seen(page.messages);
  const auto learn_all = [&](Known& known) { known = join(join(known, everything()), own_signals); };
  if (end - read > kMessages / 2) {
    learn_all(any);
    read = end;
  }
  for (; read < end; ++read) {
    const Message& there = page.message[read % kMessages];
    wait_for([&, at = read] { return seen(there.turn) == at + 1; });
    const Message m = there;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const Known sent = seen(there.turn) == read + 1 && m.turn == read + 1 && !m.everything ? fetch(m) : nullptr;
    if (m.left && (!sent || !m.known)) left[m.word * 8 + m.byte].lose();
    if (!sent || m.word == kAnyWord) {
      if (sent) any = join(any, sent);
      else if (m.turn != read + 1 || m.word == kAnyWord) learn_all(any);
      else words[m.word].learn(join(everything(), own_signals));
      continue;
    }
    if (m.left) {
      words[m.word].learn(sent);
      Clock there;
      if (m.carried) there.emplace_back(clock_key(Part::carried, m.rank, m.warp, m.pe, m.word), m.carried);
      if (!m.known) continue;
      SignalHistory& steps = left[m.word * 8 + m.byte];
      if (!m.add) steps.find(m.before);
      steps.add({m.rank, m.warp, m.lane, m.epoch, static_cast<int64_t>(m.value), sent, std::move(there), m.pe, m.word,
                 m.carried},
                m.add);
      continue;
    }
    Clock own{{steps_key(m.rank, m.warp), m.floor}};
    if (m.lane == kEveryLane) own[0].second = m.epoch;
    else own.emplace_back(steps_key(m.rank, m.warp, m.lane), m.epoch);
    if (m.carried) own.emplace_back(clock_key(Part::carried, m.rank, m.warp, m.pe, m.word), m.carried);
    words[m.word].add(m, join(sent, std::make_shared<Clock>(std::move(own))));
  }
  return inbox;
}

std::string RaceMemory::deadlock() const {
  constexpr uint64_t kRounds = 16; // a rank that has just been signalled is not among them
  std::string others;
  for (int r = 0; r < ranks(); ++r) {
    const Page& page = *pages[r];
    if (!heaps[r] || seen(page.stalled) < kRounds) return ""; // the proxy may still bring something
    if (r == me) continue;
    others += concat(others.empty() ? "rank " : ", rank ", r);
    if (page.stalled_site < kSites) others += std::string(" in ") + page.names[page.stalled_site];
    others += concat(" for the word at heap offset ", page.stalled_word);
  }
  if (others.empty()) return "";
  return "a deadlock: every thread of every rank waits, and no signal is on its way: " + others;
}

Known RaceMemory::beyond_ended(const Known& known) const {
  auto rest = std::make_shared<Clock>();
  for (const auto& [key, epoch] : *known) {
    // The end of a kernel completes no put of this rank, and adds no knowledge of them.
    const Part part = part_of(key);
    const bool own_put = rank_of(key) == me && part >= Part::fenced && part <= Part::carried && epoch > flushed;
    if (own_put || epoch > ended[rank_of(key)]) rest->emplace_back(key, epoch);
  }
  return rest;
}

// Drops entries that all later launches know anyway.
void RaceMemory::forget_finished() {
  for (Inbox& inbox : inboxes) {
    const auto forget = [&](auto& histories, const auto& keep) {
      for (auto it = histories.begin(); it != histories.end();) {
        if (it->second.forget(*this) || keep(it->first)) ++it;
        else it = histories.erase(it);
      }
    };
    forget(inbox.words, [](uint64_t) { return false; });
    forget(inbox.left, [&](uint64_t at) { return inbox.words.count(at / 8) != 0; });
  }
  for (auto it = observed.begin(); it != observed.end();) {
    const Stamp store = it->second.first;
    if (store >> 32 > ended[rank_of_stamp(store)]) ++it;
    else it = observed.erase(it);
  }
  learnt = beyond_ended(learnt);
  fetched.clear();
  published.clear();
}

void attach_race_memory(int me, uint64_t base, uint64_t bytes, const std::vector<uint64_t>& pages,
                        const std::vector<uint64_t>& heaps) {
  if (pages.empty() || pages.size() > kMaxRanks || bytes / 8 >= kMaxWords) return;
  RaceMemory& memory = memories[base];
  memory = {};
  memory.me = me;
  memory.base = base;
  memory.bytes = bytes;
  memory.heaps = heaps;
  memory.ended.assign(pages.size(), 0);
  memory.inboxes.resize(pages.size());
  for (uint64_t page : pages) memory.pages.push_back(reinterpret_cast<Page*>(page));
}

void detach_race_memory(uint64_t base) { memories.erase(base); }

RaceMemory* race_memory(uint64_t base) {
  const auto it = memories.find(base);
  return it == memories.end() ? nullptr : &it->second;
}

void note_ended_launches(uint64_t base) {
  RaceMemory* memory = race_memory(base);
  if (!memory) return;
  for (int r = 0; r < memory->ranks(); ++r) memory->ended[r] = seen(memory->pages[r]->finished);
  memory->flushed = next_epoch - 1;
  memory->put_epochs.clear();
}

void host_comes(uint64_t base) {
  RaceMemory* memory = race_memory(base);
  if (!memory) return;
  Page& page = memory->own();
  page.finished_at[(page.meetings + 1) % kMeetings] = page.finished;
  __atomic_store_n(&page.meetings, page.meetings + 1, __ATOMIC_RELEASE);
}

// A rank that has left the meeting before this one may have finished more since; that does not come before this
// rank's next work.
void host_has_met(uint64_t base) {
  RaceMemory* memory = race_memory(base);
  const std::vector<uint32_t> before = memory ? memory->ended : std::vector<uint32_t>();
  note_ended_launches_of_all();
  const uint64_t number = memory ? memory->own().meetings : 0;
  for (size_t r = 0; r < before.size(); ++r) {
    const Page& page = *memory->pages[r];
    const uint64_t come = seen(page.meetings);
    if (static_cast<int>(r) != memory->me && come >= number && come - number < kMeetings - 1)
      memory->ended[r] = std::max(before[r], seen(page.finished_at[number % kMeetings]));
  }
}

void note_ended_launches_of_all() {
  for (const auto& entry : memories) note_ended_launches(entry.first);
}

uint32_t latest_epoch() { return next_epoch - 1; }
uint32_t take_epoch() { return next_epoch++; }
void give_epoch(uint32_t last) { next_epoch = std::max(next_epoch, last + 1); }

namespace {
constexpr size_t kMaxSteps = 1024;   // of a word; beyond it, a thread that has seen the word knows all signals
constexpr size_t kMaxCompared = 256; // beyond it, a rank's adds count as added in this order
constexpr size_t kMaxPolled = 128;   // beyond it, a thread that polls knows all steps
} // namespace

void SignalHistory::add(const Message& m, const Known& sent) {
  all_ = join(all_, sent);
  add({m.rank, m.warp, m.lane, m.epoch, static_cast<int64_t>(m.value), sent, {}, m.pe, m.word, m.carried}, m.add);
}

void SignalHistory::add(Step step, bool adds) {
  (adds ? adds_ : sets_) = true;
  if (!whole_) return;
  steps_.push_back(std::move(step));
  if (steps_.size() > kMaxSteps) lose();
}

size_t SignalHistory::reached(const Seen& seen, const Known& before) const {
  if (!sets_ || adds_ || !whole_) return 0;
  size_t at = 0; // the last known step
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.rank != steps_[0].rank) return 0;
    if (steps_known(before, step.rank, step.warp, step.lane) >= step.epoch ||
        rank_known(before, step.rank) >= step.epoch)
      at = i;
  }
  if (seen.loop) { // the word has left earlier values, which may be those of an earlier round
    size_t first = steps_.size();
    while (first && seen.by(steps_[first - 1].value)) --first;
    at = std::max(at, first);
  }
  for (; at < steps_.size(); ++at)
    if (seen.by(steps_[at].value)) return at + 1;
  return 0;
}

Known SignalHistory::guaranteed(const Seen& seen, int64_t now, const Known& before, const Known& all) const {
  if (seen.any || !whole_ || (adds_ && sets_) || steps_.empty()) return all;
  if (seen.loop && steps_.size() > kMaxPolled) return all;
  Known known = nothing_known();
  if (sets_) {
    const size_t count = reached(seen, before);
    for (size_t i = 0; i < count; ++i)
      if (i + 1 == count || follows(steps_[count - 1], steps_[i])) known = join(known, of(steps_[i]));
    return count ? known : all;
  }
  // A step is needed if the word lacks it otherwise, together with its sender's later adds: then no other sender can
  // have made up for it. The word may have begun with another value than 0, and may still miss adds.
  const auto lacks = [&](int64_t lost) {
    if (!seen.loop) return lost > now - seen.value;
    const int64_t rest = now - lost;
    return !seen.by(rest) || (rest < 0 && now >= 0 && !seen.by(0)); // an unsigned word does not fall below 0
  };
  const auto falls = [](const Step& step) { return step.value < 0; };
  if (seen.loop && std::any_of(steps_.begin(), steps_.end(), falls) &&
      !std::all_of(steps_.begin(), steps_.end(), falls))
    return all; // adds of both signs may cancel out
  std::vector<const Step*> needed;
  std::map<int, int64_t> later; // of each rank
  std::map<int, const Step*> last;
  std::set<int> several; // ranks of which several warps or lanes add, which may do so in any order
  for (size_t i = steps_.size(); i-- > 0;) {
    const Step& step = steps_[i];
    const Step*& after = last[step.rank];
    if (after && (after->warp != step.warp || after->lane != step.lane)) several.insert(step.rank);
    after = &step;
    int64_t lost = later[step.rank] += step.value;
    if (lacks(lost) && several.count(step.rank) && steps_.size() <= kMaxCompared) {
      lost = step.value;
      for (size_t j = i + 1; j < steps_.size() && !lacks(lost); ++j)
        if (steps_[j].rank == step.rank && follows(steps_[j], step)) lost += steps_[j].value;
    }
    // An add that another rank makes after this one has arrived does not replace it.
    for (size_t j = i + 1; j < steps_.size() && !lacks(lost) && steps_.size() <= kMaxCompared; ++j)
      if (steps_[j].rank != step.rank && implies(steps_[j], step)) lost += steps_[j].value;
    if (lacks(lost)) needed.push_back(&step);
  }
  if (needed.size() == steps_.size()) return all;
  for (const Step* step : needed) known = join(known, of(*step));
  return known;
}

bool SignalHistory::implies(const Step& step, const Step& before) {
  if (step.rank == before.rank || !before.carried) return follows(step, before);
  const auto knows = [&](Part part, uint64_t word) {
    return epoch_of(step.known, clock_key(part, before.rank, before.warp, before.pe, word)) >= before.carried;
  };
  return knows(Part::carried, before.word) || knows(Part::done, 0) || knows(Part::done, kAllLanes) ||
         knows(Part::done, before.lane + 1) || epoch_of(step.known, clock_key(Part::all, before.rank)) >= before.epoch;
}

bool SignalHistory::follows(const Step& step, const Step& before) {
  return (step.rank == before.rank && step.warp == before.warp && step.lane == before.lane) ||
         steps_known(step.known, before.rank, before.warp, before.lane) >= before.epoch ||
         rank_known(step.known, before.rank) >= before.epoch;
}

bool SignalHistory::passes(int64_t value, size_t at, int64_t now, int rank, uint32_t warp, unsigned lane,
                           uint32_t epoch) const {
  if (!whole_ || adds_ == sets_) return false;
  const auto knows_the_wait = [&](const Step& step) {
    return steps_known(step.known, rank, warp, lane) >= epoch || rank_known(step.known, rank) >= epoch;
  };
  if (sets_) {
    while (at && at < steps_.size() && steps_[at].value == value) ++at;
    return at && at < steps_.size() && !knows_the_wait(steps_[at]);
  }
  int64_t word = now;
  for (const Step& step : steps_) {
    if (step.value < 0) return false; // it may come to the value twice
    word -= step.value;               // its initial value
  }
  for (const Step& step : steps_) {
    if (word >= value && step.value && !knows_the_wait(step)) return true;
    word += step.value;
  }
  return false;
}

bool SignalHistory::forget(const RaceMemory& memory) {
  const std::vector<uint32_t>& ended = memory.ended;
  all_ = memory.beyond_ended(all_);
  // The host may have changed the word since.
  const auto old = [&](const Step& step) { return step.epoch <= ended[step.rank]; };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), old), steps_.end());
  return !all_->empty() || !steps_.empty();
}

} // namespace tsn::sim
