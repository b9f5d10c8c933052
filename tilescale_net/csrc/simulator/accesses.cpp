// The part of HappensBefore that compares accesses to heaps: plain ones of this rank, and transfers of any rank.
//
// Each access compares itself with the stamps of earlier accesses to its bytes, and leaves its own stamp. So of two
// unordered accesses the later one finds the earlier, in whichever order they ran.
#include "happens_before.h"

#include "memory.h"
#include "tilescale_net/device/context.h"

namespace tsn::sim {

std::string HappensBefore::who(const Actor& actor) const {
  return concat("rank ", memory_->me, " block ", actor.block, " thread ", actor.thread);
}

Stamp HappensBefore::unordered(Stamp stamp, uint32_t warp, unsigned lane) {
  if (!comes_before(stamp, warp, lane)) return stamp;
  const int rank = rank_of_stamp(stamp);
  Transfer t;
  while (touch_of(stamp) == Touch::source && rank < memory_->ranks() && memory_->find(rank, stamp >> 8, &t) &&
         t.replaced) {
    stamp = transfer_stamp(rank, Touch::source, t.replaced);
    if (!comes_before(stamp, warp, lane)) return stamp;
  }
  return 0;
}

Stamp HappensBefore::unordered(Stamp stamp, int rank, uint64_t offset, uint32_t warp, unsigned lane) {
  stamp = unordered(stamp, warp, lane);
  if (!stamp || memory_->observed.empty()) return stamp;
  const auto it = memory_->observed.find(RaceMemory::word_key(rank, offset));
  const bool found = it != memory_->observed.end() && it->second.first == stamp;
  return found && comes_before(it->second.second, warp, lane) ? 0 : stamp;
}

bool HappensBefore::comes_before(Stamp stamp, uint32_t warp, unsigned lane) {
  const int rank = rank_of_stamp(stamp);
  if (!stamp || rank >= memory_->ranks()) return true;
  if (!follows_ranks_ && rank != memory_->me) return true;
  const Known& known = known_to(at(warp), lane);
  const auto knows = [&](Part part, uint32_t by, uint32_t epoch, int pe, uint64_t word) {
    return epoch_of(known, clock_key(part, rank, by, pe, word)) >= epoch;
  };
  if (touch_of(stamp) == Touch::access) {
    const uint32_t by = static_cast<uint32_t>(stamp >> 8 & 0xffff), epoch = static_cast<uint32_t>(stamp >> 32);
    if (rank_known(known, rank) >= epoch) return true;
    const unsigned by_lane = lane_of_access(stamp);
    if (rank != memory_->me) return steps_known(known, rank, by, by_lane) >= epoch;
    return comes_before({by, epoch, -1, -1, 0, 0, by_lane}, warp, lane);
  }
  Transfer t;
  if (!memory_->find(rank, stamp >> 8, &t)) return true;
  // The end of a kernel completes no put of its rank.
  const bool own_put = rank == memory_->me && touch_of(stamp) != Touch::get && t.epoch > memory_->flushed;
  if (knows(Part::all, 0, t.epoch, 0, 0) && !own_put) return true;
  if (own_put && epoch_of(known, memory_->all_done()) >= t.epoch) return true;
  if (touch_of(stamp) == Touch::get || !follows_ranks_)
    return rank_known(known, rank) >= t.epoch || (rank == memory_->me && t.warp == warp) ||
           steps_known(known, rank, t.warp, t.lane ? t.lane - 1 : kEveryLane) >= t.epoch;
  if (t.word != kNoWord && knows(Part::carried, t.warp, t.epoch, t.pe, t.word)) return true;
  const auto done = [&](uint32_t by, uint64_t lanes) {
    return knows(Part::done, by, t.epoch, t.pe, lanes) ||
           (behind_fences_ && rank == memory_->me && knows(Part::fenced, by, t.epoch, t.pe, lanes));
  };
  if (t.lane) return done(t.warp, kAllLanes) || done(t.warp, t.lane);
  for (uint32_t i = 0; i < t.warps; ++i)
    if (!done(t.warp + i, 0)) return false;
  return true;
}

void HappensBefore::benign_race(const void* address, uint64_t bytes) {
  if (!memory_ || !memory_->holds(address)) return;
  uint64_t& end = benign_[memory_->offset(address)];
  end = std::max(end, memory_->offset(address) + bytes);
}

bool HappensBefore::is_benign(uint64_t first, uint64_t last) const {
  for (const auto& [begin, end] : benign_)
    if (last > begin && first < end) return true;
  return false;
}

void HappensBefore::look(int rank, bool of_stores, uint64_t offset, uint64_t bytes, const Actor& actor, Stamp mark,
                         Found* found, bool keep_unordered, Stamp own) {
  if (!own) own = mark;
  const bool atomic = own && (is_signal(own) || memory_->is_atomic(own));
  const auto narrow = [](Stamp s) { return touch_of(s) == Touch::access && s & kAtomicStamp && s & kNarrowStamp; };
  const bool observes = of_stores && atomic && !mark; // values that it finds come before its later accesses, as in PTX
  Stamp before = 0, wrong = 0;                        // unordered ones of the latter
  const auto& shadow = of_stores ? memory_->stores(rank) : memory_->loads(rank);
  shadow.each(offset, bytes, mark, site_of(actor), [&](Stamp stamp, Site site, uint64_t begin, uint64_t end) {
    const bool again = stamp == before;
    if (!again && (found || keep_unordered)) wrong = unordered(stamp, rank, begin, actor.warp, actor.lane());
    before = stamp;
    // Atomic operations do not race with one another, nor with signals, which add to words as well; except between
    // ranks if one lacks system scope.
    const bool both_atomic = wrong && atomic && (is_signal(wrong) || memory_->is_atomic(wrong));
    const bool too_narrow = both_atomic && rank_of_stamp(wrong) != memory_->me && (narrow(own) || narrow(wrong));
    if (both_atomic && !too_narrow) {
      if (observes && touch_of(wrong) == Touch::access && !is_signal(wrong))
        for (uint64_t at = offset; at < offset + bytes; at += 4)
          memory_->observed[RaceMemory::word_key(rank, at)] = {wrong, own};
      wrong = 0;
    }
    if (found && wrong) {
      if (again && found->stamp == wrong && found->end == begin) found->end = end;
      else if (!found->stamp && !is_benign(begin, end)) *found = {wrong, of_stores, begin, end, site, too_narrow};
    }
    return !(wrong && keep_unordered);
  });
}

uint64_t HappensBefore::record(const Actor& actor, const Event& event, uint32_t warps, uint64_t word,
                               const std::string& name, uint32_t lane) {
  Page& page = memory_->own();
  const uint64_t number = ++page.transfers;
  Transfer& made = page.transfer[number % kTransfers];
  __atomic_store_n(&made.number, 0, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  made.word = word;
  made.warp = event.warp;
  made.epoch = event.epoch;
  made.warps = warps;
  made.lane = lane;
  made.thread = actor.thread;
  made.block = actor.block;
  made.pe = event.pe;
  made.site = memory_->site(name);
  made.replaced = made.n_replaced = 0;
  made.atomic = event.operation == kOpAtomic;
  __atomic_store_n(&made.number, number, __ATOMIC_RELEASE);
  return number;
}

std::string HappensBefore::viewed(const Actor& actor, const void* address, uint64_t bytes, bool store,
                                  const char* name) {
  const int pe = memory_ && follows_ranks_ ? memory_->owner(address) : -1;
  if (pe < 0 || pe == memory_->me) return "";
  const uint64_t offset = reinterpret_cast<uint64_t>(address) - memory_->heaps[pe];
  Stamp mark = stamp(actor.warp, actor.lane());
  if (store) {
    const unsigned lane = actor.thread % 32;
    auto& [epoch, number] = view_stores_[{actor.warp * 32ull + lane, pe, actor.line}];
    if (epoch != at(actor.warp).epoch) {
      epoch = at(actor.warp).epoch;
      const Event event{actor.warp, epoch, pe, actor.line, kOpPut, 0, lane};
      number = record(actor, event, 1, kNoWord, std::string("a store to ") + name + line(actor.line), lane + 1);
      note_thread_put(event);
      direct_epochs_[{actor.warp * 32ull + lane, pe}] = epoch;
    }
    mark = transfer_stamp(memory_->me, Touch::put, number);
  }
  Found found;
  look(pe, true, offset, bytes, actor, store ? mark : 0, &found);
  // A store through a view comes after an earlier one of the same warp.
  Transfer t;
  if (found.stamp && touch_of(found.stamp) == Touch::put && rank_of_stamp(found.stamp) == memory_->me &&
      memory_->find(memory_->me, found.stamp >> 8, &t) && t.warp == actor.warp)
    found = {};
  look(pe, false, offset, bytes, actor, store ? 0 : mark, store ? &found : nullptr, true);
  if (!found.stamp) return "";
  return race(actor, plain_access(actor, store, name), found, pe, store ? Change::store : Change::none);
}

std::string HappensBefore::plain_access(const Actor& actor, bool store, const char* name) const {
  return concat(store ? "a store to " : "a load of ", name, line(actor.line), " by ", who(actor),
                store ? " writes" : " reads");
}

// Whether the heap holds all rows of a copy.
bool HappensBefore::all_held(const void* p, int64_t pitch, const Call& call) const {
  const uint64_t span = static_cast<uint64_t>((call.rows - 1) * pitch + call.bytes);
  return memory_->holds(p) && span <= memory_->bytes - memory_->offset(p);
}

std::string HappensBefore::transfer(const Actor& actor, const Event& event, const Call& call, uint32_t warps) {
  if (!memory_ || call.bytes <= 0 || call.pe < 0 || call.pe >= memory_->ranks()) return "";
  if (!(call.operation == kOpGet ? all_held(call.source, call.source_pitch, call)
                                 : all_held(call.destination, call.pitch, call)))
    return ""; // reported elsewhere
  const uint64_t word = call.operation == kOpPutSignal ? memory_->offset(call.signal) / 8 : kNoWord;
  const uint64_t number = record(actor, event, warps, word,
                                 primitive_name(event.operation, event.scope, names_, event.line) + line(event.line),
                                 event.lane < kEveryLane ? event.lane + 1 : 0);
  if (call.operation == kOpGet && !follows_ranks_) return "";
  if (call.operation == kOpGet) return got(actor, event, call, transfer_stamp(memory_->me, Touch::get, number));
  return put(actor, event, call, transfer_stamp(memory_->me, Touch::source, number),
             transfer_stamp(memory_->me, Touch::put, number));
}

std::string HappensBefore::changed_word(const Actor& actor, const Event& event, const Call& call) {
  if (!follows_ranks_ || call.pe < 0 || call.pe >= memory_->ranks() || !memory_->holds(call.signal)) return "";
  const uint64_t offset = memory_->offset(call.signal);
  Found found;
  const Stamp mark = access_stamp(memory_->me, event.warp, actor.lane(), event.epoch) | kSignalStamp;
  const auto of_host = [&] {
    return touch_of(found.stamp) == Touch::access && (found.stamp >> 8 & 0xffff) == kHostWarp;
  };
  look(call.pe, true, offset, 8, actor, mark, &found);
  if (found.stamp && !of_host()) found = {}; // see stored_plainly
  look(call.pe, false, offset, 8, actor, 0, found.stamp ? nullptr : &found, false, mark);
  if (!found.stamp || touch_of(found.stamp) != Touch::access) return "";
  if (!found.stores && of_host()) return ""; // the host may look at words
  const std::string what = concat(name(event), " of rank ", memory_->me, " to PE ", call.pe);
  return race(actor, what + " changes", found, call.pe, Change::signal);
}

uint64_t HappensBefore::whole_number(uint32_t number) const {
  const uint64_t latest = memory_->own().transfers;
  return latest - ((latest - number) & 0x7fffffff);
}

bool HappensBefore::source_is_free(uint32_t number, uint32_t warp, unsigned lane) {
  return !unordered(transfer_stamp(memory_->me, Touch::source, whole_number(number)), warp, lane);
}

std::string HappensBefore::thread_of_transfer(uint32_t number) const {
  Transfer t;
  if (!memory_->find(memory_->me, whole_number(number), &t)) return "this rank";
  return concat("block ", t.block, " thread ", t.thread, " to PE ", t.pe);
}

void HappensBefore::replaces(uint64_t put, uint32_t before, uint32_t warp, unsigned lane) {
  const auto source = [&](uint64_t number) { return transfer_stamp(memory_->me, Touch::source, number); };
  note_replaced(source(put), unordered(source(whole_number(before)), warp, lane));
}

std::string HappensBefore::put(const Actor& actor, const Event& event, const Call& call, Stamp source, Stamp target) {
  const uint64_t bytes = static_cast<uint64_t>(call.bytes);
  const std::string what = concat(primitive_name(event.operation, event.scope, names_, event.line), line(event.line),
                                  " of ", who(actor), " to PE ", call.pe);
  std::string wrong;
  if (all_held(call.source, call.source_pitch, call)) {
    Found found;
    Stamp replaced = 0;
    bool alike = true; // an earlier put has read all of these bytes
    call.each_row([&](const void*, const void* row) {
      const uint64_t from = memory_->offset(row);
      look(memory_->me, true, from, bytes, actor, 0, &found);
      Found reads;
      look(memory_->me, false, from, bytes, actor, source, &reads);
      alike =
          alike && (row == call.source || reads.stamp == replaced) && reads.begin == from && reads.end == from + bytes;
      replaced = reads.stamp;
    });
    if (alike) note_replaced(source, replaced);
    if (found.stamp) wrong = race(actor, what + " sends", found, memory_->me, Change::none);
  }
  // A copy of bytes onto themselves changes nothing.
  const bool onto_itself =
      call.pe == memory_->me && call.source == call.destination && (call.rows <= 1 || call.pitch == call.source_pitch);
  if (!follows_ranks_ || onto_itself) return wrong;
  Found found;
  call.each_row([&](const void* row, const void*) {
    const uint64_t to = memory_->offset(row);
    look(call.pe, true, to, bytes, actor, target, &found);
    look(call.pe, false, to, bytes, actor, 0, &found);
  });
  if (found.stamp && wrong.empty()) wrong = race(actor, what + " writes", found, call.pe, Change::put);
  return wrong;
}

// An operation with a result is done when it returns, like an access; one without arrives like a put.
std::string HappensBefore::atomic(const Actor& actor, const Event& event, const Call& call, bool done) {
  if (!memory_ || call.pe < 0 || call.pe >= memory_->ranks() || !memory_->holds(call.destination)) return "";
  const uint64_t offset = memory_->offset(call.destination), bytes = static_cast<uint64_t>(call.bytes);
  if (bytes > memory_->bytes - offset) return ""; // reported elsewhere
  const bool late = !done && call.pe != memory_->me;
  if (!follows_ranks_) return "";
  Stamp mark = access_stamp(memory_->me, event.warp, actor.lane(), event.epoch) | kAtomicStamp;
  const std::string name = primitive_name(event.operation, event.scope, names_, event.line) + line(event.line);
  if (late) {
    note_thread_put(event); // it may announce earlier fenced data: no fence need follow
    direct_epochs_[{event.warp * 32ull + actor.lane(), call.pe}] = event.epoch;
    mark = transfer_stamp(memory_->me, Touch::put, record(actor, event, 1, kNoWord, name, actor.lane() + 1));
  }
  Found found;
  behind_fences_ = true;
  look(call.pe, true, offset, bytes, actor, mark, &found);
  look(call.pe, false, offset, bytes, actor, 0, &found, false, mark);
  behind_fences_ = false;
  const bool own = touch_of(found.stamp) == Touch::access && rank_of_stamp(found.stamp) == memory_->me;
  if (!found.stamp || (own && call.pe == memory_->me)) return ""; // plain accesses of one rank are compared elsewhere
  return race(actor, concat(name, " of ", who(actor), " to PE ", call.pe, " changes"), found, call.pe, Change::put);
}

// Plain accesses and atomic ones of one rank to its heap are compared elsewhere.
std::string HappensBefore::compared(const Actor& actor, int rank, uint64_t offset, uint64_t bytes, WordAccess access,
                                    MemScope scope) {
  const bool loads = access == WordAccess::read;
  const Stamp mark = access_stamp(memory_->me, actor.warp, actor.lane(), at(actor.warp).epoch) | kAtomicStamp |
                     (scope == MemScope::sys ? 0 : kNarrowStamp);
  Found stored, loaded;
  behind_fences_ = true;
  look(rank, true, offset, bytes, actor, loads ? 0 : mark, &stored, false, mark);
  look(rank, false, offset, bytes, actor, loads ? mark : 0, loads ? nullptr : &loaded, loads, mark);
  behind_fences_ = false;
  for (const Found& found : {stored, loaded}) {
    if (!found.stamp) continue;
    const bool own = rank_of_stamp(found.stamp) == memory_->me;
    Transfer t;
    // The thread's stores through a view come before it.
    if (own && touch_of(found.stamp) == Touch::put && memory_->find(memory_->me, found.stamp >> 8, &t) && t.lane &&
        t.warp == actor.warp && t.lane == actor.lane() + 1)
      continue;
    if (own && touch_of(found.stamp) == Touch::access) continue;
    const char* what = loads                         ? "an atomic load"
                       : access == WordAccess::write ? "an atomic store"
                                                     : "an atomic operation";
    return race(actor, concat(what, line(actor.line), " by ", who(actor), loads ? " reads" : " changes"), found, rank,
                loads                 ? Change::none
                : rank == memory_->me ? Change::own
                                      : Change::store);
  }
  return "";
}

void HappensBefore::note_replaced(Stamp source, Stamp before) {
  Transfer other;
  if (touch_of(before) != Touch::source || rank_of_stamp(before) != memory_->me) return;
  if (!memory_->find(memory_->me, before >> 8, &other)) return;
  Transfer& made = memory_->own().transfer[(source >> 8) % kTransfers];
  // When the new one is done, so is an earlier one of its warp to the PE.
  const bool same = other.pe == made.pe && other.warp == made.warp && other.lane == made.lane;
  const uint32_t n_replaced = other.n_replaced + (same ? 0 : 1);
  if (n_replaced >= kMostReplaced) return;
  made.n_replaced = n_replaced;
  __atomic_store_n(&made.replaced, same ? other.replaced : before >> 8, __ATOMIC_RELEASE);
}

std::string HappensBefore::got(const Actor& actor, const Event& event, const Call& call, Stamp source) {
  const uint64_t bytes = static_cast<uint64_t>(call.bytes);
  const std::string what = concat(primitive_name(event.operation, event.scope, names_, event.line), line(event.line),
                                  " of ", who(actor), " from PE ", call.pe);
  Found found;
  call.each_row([&](const void*, const void* row) {
    look(call.pe, true, memory_->offset(row), bytes, actor, 0, &found);
    look(call.pe, false, memory_->offset(row), bytes, actor, source, nullptr);
  });
  if (found.stamp) return race(actor, what + " reads", found, call.pe, Change::none);
  if (!all_held(call.destination, call.pitch, call)) return "";
  const Stamp filled = access_stamp(memory_->me, event.warp, actor.lane(), event.epoch);
  call.each_row([&](const void* row, const void*) {
    look(memory_->me, true, memory_->offset(row), bytes, actor, filled, &found);
    look(memory_->me, false, memory_->offset(row), bytes, actor, 0, &found);
  });
  return found.stamp ? race(actor, what + " fills", found, memory_->me, Change::own) : "";
}

std::string HappensBefore::accessed(const Actor& actor, const void* address, uint64_t bytes, bool store,
                                    const char* name, bool judge, Thread& view) {
  if (!memory_) return "";
  const int me = memory_->me;
  const uint64_t offset = memory_->offset(address);
  const Stamp own = stamp(actor.warp, actor.lane());
  const Site site = site_of(actor);
  Found found;
  // Accesses of one rank are not compared with each other.
  const auto after = [&](Stamp s, uint64_t at) {
    if (touch_of(s) == Touch::access && rank_of_stamp(s) == memory_->me) return Stamp(0);
    return unordered(s, me, at, actor.warp, actor.lane());
  };
  memory_->stores(me).each(offset, bytes, store ? own : 0, site, [&](Stamp s, Site by, uint64_t begin, uint64_t end) {
    const Stamp wrong = after(s, begin);
    if (!wrong) view.ordered_store = s;
    else if (!found.stamp) found = {wrong, true, begin, end, by};
    return true;
  });
  memory_->loads(me).each(offset, bytes, store ? 0 : own, site, [&](Stamp s, Site by, uint64_t begin, uint64_t end) {
    const Stamp wrong = after(s, begin);
    if (!wrong) view.ordered_load = s;
    else if (store && !found.stamp) found = {wrong, false, begin, end, by};
    return !wrong;
  });
  if (!found.stamp || !judge || is_benign(found.begin, found.end)) return "";
  return race(actor, plain_access(actor, store, name), found, memory_->me, store ? Change::own : Change::none);
}

std::string HappensBefore::host(uint64_t offset, uint64_t bytes, bool store, const std::string& name) {
  Found found;
  const Stamp mark = stamp(kHostWarp, 0);
  const Actor host{kHostWarp, 0, 0, lines_.empty() ? -1 : 0};
  look(memory_->me, true, offset, bytes, host, store ? mark : 0, &found);
  if (!store && is_signal(found.stamp)) found = {}; // the host may look at words
  look(memory_->me, false, offset, bytes, host, store ? 0 : mark, store ? &found : nullptr, true);
  if (!found.stamp) return "";
  return race(host, name + line(host.line) + (store ? " writes" : " reads"), found, memory_->me,
              store ? Change::own : Change::none);
}

// The host's accesses between launches, at this line of its program.
static HappensBefore order_of_host(RaceMemory* memory, const std::vector<std::string>& lines) {
  static const std::vector<std::string> no_names;
  const uint32_t warps = memory->own().warps_per_block;
  return {warps ? warps : 1, lines, no_names, memory, true};
}

std::string host_access(uint64_t base, const std::vector<std::pair<uint64_t, uint64_t>>& runs, bool store,
                        const std::string& name, const std::string& line) {
  RaceMemory* memory = race_memory(base);
  if (!memory) return "";
  const std::vector<std::string> lines(line.empty() ? 0 : 1, line);
  HappensBefore order = order_of_host(memory, lines);
  std::string wrong;
  for (const auto& [address, bytes] : runs) {
    const uint64_t offset = address - base;
    if (offset >= memory->bytes || bytes > memory->bytes - offset) continue;
    const std::string found = order.host(offset, bytes, store, name);
    if (wrong.empty() && !found.empty()) wrong = concat("rank ", memory->me, ": ", found);
  }
  return wrong;
}

// A store known to the shadow that has already taken effect did not change the byte; a later one may have. A put of
// another rank arrives at some time after its stamp, unless a put of this rank sends the byte, which must then have
// arrived.
bool HappensBefore::written_by_host(uint64_t offset) {
  Stamp stored = 0, read = 0;
  const auto get = [](Stamp* to) { return [to](Stamp s, Site, uint64_t, uint64_t) { return *to = s, false; }; };
  memory_->stores(memory_->me).each(offset, 1, 0, 0, get(&stored));
  const size_t rank = static_cast<size_t>(rank_of_stamp(stored));
  if (!stored) return true;
  if (touch_of(stored) == Touch::access)
    return static_cast<int>(rank) == memory_->me && !is_signal(stored) && stored >> 32 <= memory_->alias_epoch;
  if (rank >= memory_->alias_transfers.size() || stored >> 8 > memory_->alias_transfers[rank]) return false;
  memory_->loads(memory_->me).each(offset, 1, 0, 0, get(&read));
  return touch_of(read) == Touch::source && rank_of_stamp(read) == memory_->me && unordered(read, kHostWarp, 0);
}

uint64_t add_alias(uint64_t base, const std::vector<std::pair<uint64_t, uint64_t>>& runs, uint64_t element,
                   const std::string& line) {
  static uint64_t latest = 0;
  RaceMemory* memory = race_memory(base);
  if (!memory) return 0;
  Alias& alias = memory->aliases[++latest];
  alias.element = element;
  alias.lines.assign(line.empty() ? 0 : 1, line);
  for (const auto& [address, bytes] : runs)
    if (address - base < memory->bytes && bytes <= memory->bytes - (address - base))
      alias.runs.emplace_back(address - base, bytes);
  return latest;
}

void drop_alias(uint64_t base, uint64_t number) {
  if (RaceMemory* memory = race_memory(base)) memory->aliases.erase(number);
}

void take_aliases(uint64_t base, bool still_changing) {
  RaceMemory* memory = race_memory(base);
  if (!memory || memory->aliases.empty()) return;
  memory->alias_epoch = latest_epoch();
  memory->alias_transfers.clear();
  for (const Page* page : memory->pages)
    memory->alias_transfers.push_back(__atomic_load_n(&page->transfers, __ATOMIC_ACQUIRE));
  for (auto& entry : memory->aliases) {
    std::vector<char>& bytes = entry.second.bytes;
    bytes.clear();
    if (still_changing) continue;
    for (const auto& [offset, size] : entry.second.runs) {
      const char* begin = reinterpret_cast<const char*>(base + offset);
      bytes.insert(bytes.end(), begin, begin + size);
    }
  }
}

std::string alias_access(uint64_t base, const std::string& name) {
  RaceMemory* memory = race_memory(base);
  if (!memory || memory->aliases.empty()) return "";
  std::string wrong;
  for (const auto& [number, alias] : memory->aliases) {
    const char* before = alias.bytes.data();
    if (alias.bytes.empty()) continue; // nothing was taken yet
    HappensBefore order = order_of_host(memory, alias.lines);
    for (const auto& [offset, size] : alias.runs) {
      const char* now = reinterpret_cast<const char*>(base + offset);
      const auto is_written = [&](uint64_t from, uint64_t bytes) {
        for (uint64_t i = from; i < from + bytes; ++i)
          if (before[i] != now[i] && order.written_by_host(offset + i)) return true;
        return false;
      };
      const uint64_t step = alias.element;
      for (uint64_t from = 0, to = 0; from < size && memcmp(before + from, now + from, size - from); from = to + step) {
        while (from < size && !is_written(from, step)) from += step;
        for (to = from; to < size && is_written(to, step); to += step) {
        }
        const std::string found = to > from ? order.host(offset + from, to - from, true, name) : "";
        if (wrong.empty() && !found.empty()) wrong = concat("rank ", memory->me, ": ", found);
      }
      before += size;
    }
  }
  return wrong;
}

std::string HappensBefore::name_of(const Found& found) const {
  const int rank = rank_of_stamp(found.stamp);
  const Page& page = *memory_->pages[rank];
  const std::string of = concat(" of rank ", rank, " block ");
  if (touch_of(found.stamp) == Touch::access) {
    const uint32_t warp = static_cast<uint32_t>(found.stamp >> 8 & 0xffff);
    const std::string site = found.site ? std::string(" ") + page.names[found.site - 1] : "";
    if (warp == kHostWarp) return concat("the host of rank ", rank, site);
    const uint32_t per_block = page.warps_per_block ? page.warps_per_block : 1;
    const char* what = is_signal(found.stamp)       ? "a signal"
                       : found.stamp & kAtomicStamp ? found.stores ? "an atomic operation" : "an atomic load"
                       : found.stores               ? "a store"
                                                    : "a load";
    return concat(what, of, warp / per_block, " thread ", warp % per_block * 32 + lane_of_access(found.stamp) % 32,
                  site);
  }
  Transfer t;
  if (!memory_->find(rank, found.stamp >> 8, &t)) return concat("a transfer of rank ", rank);
  return concat(t.site < kSites ? page.names[t.site] : "a transfer", of, t.block, " thread ", t.thread,
                touch_of(found.stamp) == Touch::get ? " from PE " : " to PE ", t.pe);
}

Site HappensBefore::site_of(const Actor& actor) const {
  const size_t at = static_cast<size_t>(actor.line + 1);
  return at < sites_.size() ? sites_[at] : 0;
}

std::string HappensBefore::advice(const Actor& actor, const Found& found, int owner, Change change) {
  const int rank = rank_of_stamp(found.stamp);
  const std::string quiet =
      "N.quiet, or a signal of the target that it has the data and a wait for it, is missing between them";
  if (found.narrow)
    return "the scope of one does not hold the other: between ranks N.atomic_*, or N.ld and N.st with scope=\"sys\", "
           "are needed on both sides (T.atomic_* have the scope of the GPU)";
  const bool words = is_signal(found.stamp) || change == Change::signal;
  const bool of_host = touch_of(found.stamp) == Touch::access && (found.stamp >> 8 & 0xffff) == kHostWarp;
  if (words && (of_host || actor.warp == kHostWarp))
    return "tsn.barrier() is missing before the host sets a signal word anew, or after it";
  if (words) return "a signal word is read by N.wait or N.test, or after one of them";
  // The intended order is unknown: the other one may come too early.
  const bool to_owner = rank == owner && (change == Change::put || change == Change::store);
  const std::string changes = change == Change::put ? "put" : "store";
  const auto too_early = [&](const std::string& what) {
    return to_owner ? concat("; or PE ", rank, " ", what, "s before it has waited for the ", changes,
                             ": a wait before that ", what, " is missing")
                    : "";
  };
  Transfer t;
  const bool transfer = touch_of(found.stamp) != Touch::access && memory_->find(rank, found.stamp >> 8, &t);
  if (!transfer || touch_of(found.stamp) == Touch::get) {
    if (rank == memory_->me) return "T.sync_threads() or another synchronisation is missing between them";
    const std::string what = transfer ? "get" : found.stores ? "store" : "load";
    return concat(
        "a signal of PE ", rank, " after the ", what,
        ", sent after all of its threads are there (T.sync_threads), and a wait for it are missing between them",
        too_early(what));
  }
  if (rank == memory_->me && found.stores)
    return "N.quiet, or a signal after a fence (or of N.put_signal) and a wait for it, is missing between them";
  if (rank == memory_->me && t.warp != actor.warp)
    return quiet + "; or the put is meant to send what is stored: T.sync_threads() is missing before the put";
  if (rank == memory_->me) return quiet;
  if (t.pe != owner) return quiet + too_early("put");
  // The reverse: the put may belong to a later round than the access.
  const std::string early_put =
      owner == memory_->me ? concat("; or the put comes too early: a signal of PE ", owner,
                                    " when it is done with these bytes, and a wait for it before the put, are missing")
                           : "";
  const Known& known = known_to(at(actor.warp), actor.lane());
  if (t.word != kNoWord) {
    const Key key = clock_key(Part::carried, rank, t.warp, t.pe, t.word);
    const State& own = at(actor.warp);
    for (unsigned lane = 0; own.lanes && owner == memory_->me && lane < kEveryLane; ++lane)
      if (epoch_of(known_to(own, lane), key) >= t.epoch)
        return concat(
            "lane ", lane,
            " has waited for its signal, this one has not: N.wait_warp, or T.sync_warp() after the wait, is missing");
    for (const auto& entry : warps_)
      if (owner == memory_->me && epoch_of(entry.second.known, key) >= t.epoch)
        return place(entry.first) + " has waited for its signal, this thread has not: N.wait_block, or "
                                    "T.sync_threads() after the wait, is missing";
    return concat("a wait for its signal, the word at heap offset ", t.word * 8, ", is missing between them",
                  early_put);
  }
  for (uint64_t lane = 1; t.lane && lane < kAllLanes; ++lane)
    if (epoch_of(known, clock_key(Part::done, rank, t.warp, t.pe, lane)) >= t.epoch)
      return "T.sync_warp() is missing between it and N.fence or N.quiet, which another lane calls";
  if (epoch_of(known, clock_key(Part::done, rank, t.warp, t.pe)) >= t.epoch)
    return "T.sync_threads() is missing between the put, which all warps of the block make, and N.fence or N.quiet";
  const bool fenced = rank != memory_->me && epoch_of(known, steps_key(rank, t.warp)) < t.epoch;
  if (fenced && !t.lane && steps_known(known, rank, t.warp, t.thread % 32) >= t.epoch)
    return "T.sync_warp() or T.sync_threads() is missing between the put, which all lanes make, and N.fence or N.quiet";
  if (steps_known(known, rank, t.warp, t.lane ? t.lane - 1 : kEveryLane) >= t.epoch)
    return concat("N.fence(", t.pe, ") is missing after the ",
                  t.atomic ? "atomic operation and before the signal"
                           : "put and before the signal (or use N.put_signal)");
  return "a signal after the put and a fence, and a wait for it, are missing between them" + early_put;
}

std::string HappensBefore::race(const Actor& actor, const std::string& what, const Found& found, int owner,
                                Change change) {
  const bool writes = change != Change::none, other_writes = found.stores;
  return concat(what, " ", describe_range(memory_->base + found.begin, found.end - found.begin), " of rank ", owner,
                ", which ", name_of(found), other_writes ? " writes" : " reads", writes && other_writes ? " too" : "",
                ", and nothing orders the two: ", advice(actor, found, owner, change));
}

} // namespace tsn::sim
