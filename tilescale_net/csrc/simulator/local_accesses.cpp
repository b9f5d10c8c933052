#include "local_accesses.h"

#include "rules.h"

namespace tsn::sim {

namespace {
constexpr uint32_t epoch_of_stamp(uint64_t stamp) { return static_cast<uint32_t>(stamp >> 32); }
constexpr uint32_t warp_of_stamp(uint64_t stamp) { return static_cast<uint32_t>(stamp >> 16 & 0xffff); }
constexpr unsigned lane_of_stamp(uint64_t stamp) { return static_cast<unsigned>(stamp >> 11 & 31); }
constexpr uint64_t kInfoName = (1ull << 48) - 1;
constexpr uint64_t put_stamp(uint64_t number) { return kLocalPut | (number & 0x7fffffff) << 32; }
const char* name_of(uint64_t info) { return reinterpret_cast<const char*>(info & kInfoName); }
// Prefix of the names of primitives among the accesses.
constexpr char kCall = '\1';
bool is_call(const char* name) { return name && *name == kCall; }
uint64_t info_of(const char* name, const Thread& view) {
  return (address_of(name) & kInfoName) | static_cast<uint64_t>(static_cast<uint16_t>(view.site + 1)) << 48;
}
} // namespace

LocalAccesses::LocalAccesses(HappensBefore& order, unsigned warps_per_block, const std::vector<std::string>& lines)
    : order_(order), warps_per_block_(warps_per_block), lines_(lines), first_epoch_(order.first_epoch()) {}

void LocalAccesses::forget(const void* p, uint64_t bytes) {
  const uint64_t end = address_of(p) + bytes;
  for (uint64_t at = address_of(p) / 4 * 4; at < end; at += 4) {
    const auto page = pages_.find(at / kLocalPage);
    if (page == pages_.end()) at = (at / kLocalPage + 1) * kLocalPage - 4;
    else page->second->cells[at % kLocalPage / 4] = LocalCell();
  }
}

void LocalAccesses::benign_race(const void* p, uint64_t bytes) {
  const std::pair<uint64_t, uint64_t> range{address_of(p), address_of(p) + bytes};
  if (std::find(benign_.begin(), benign_.end(), range) == benign_.end()) benign_.push_back(range);
}

bool LocalAccesses::is_benign(uint64_t at) const {
  return std::any_of(benign_.begin(), benign_.end(),
                     [&](const auto& range) { return at + 4 > range.first && at < range.second; });
}

void LocalAccesses::enter(Thread& view, uint32_t warp) {
  view.local = &shadow_;
  view.local_stamp = static_cast<uint64_t>(order_.epoch(warp)) << 32 | static_cast<uint64_t>(warp) << 16 |
                     static_cast<uint64_t>(view.lane) << 11;
  view.local_begin = first_epoch_;
}

LocalCell& LocalAccesses::cell(uint64_t at) {
  const uint64_t number = at / kLocalPage;
  LocalPages::Line& line = shadow_.lines[number % kLocalLines];
  if (line.number != number) {
    static LocalCell nobody;
    auto it = pages_.find(number);
    if (it == pages_.end()) {
      if (pages_.size() == kMaxLocalPages) {
        more_pages_ = true;
        return nobody = LocalCell();
      }
      it = pages_.emplace(number, std::make_unique<Page>()).first;
    }
    line = {number, it->second->cells};
  }
  return line.cells[at % kLocalPage / 4];
}

void LocalAccesses::add_gaps(std::set<std::string>& gaps) const {
  if (more_pages_) gaps.insert(gap_text(Gap::pages));
}

bool LocalAccesses::ordered(uint64_t stamp, Thread& view, uint32_t warp) {
  const uint32_t epoch = epoch_of_stamp(stamp), by = warp_of_stamp(stamp);
  if (is_local_put(stamp)) return order_.source_is_free(epoch, warp, view.lane);
  if (!stamp || epoch < first_epoch_) return true;
  const unsigned lane = lane_of_stamp(stamp);
  if (by == warp && lane == view.lane) return true;
  const uint32_t known = order_.known_steps(warp, view.lane, by, lane);
  view.local_known[local_slot(stamp)] = (stamp & kLocalThread) << 21 | known;
  return known >= epoch;
}

std::string LocalAccesses::accessed(Thread& view, uint32_t warp, const void* p, uint64_t bytes, LocalAccess access,
                                    const char* name, const void* base, SharedRange shared) {
  std::string wrong = stored();
  const uint64_t info = info_of(name, view);
  const bool loads = access == LocalAccess::load || access == LocalAccess::atomic_load;
  const uint64_t atomic = access >= LocalAccess::atomic ? kLocalAtomic : 0;
  for (uint64_t at = address_of(p) / 4 * 4; at < address_of(p) + bytes; at += 4) {
    LocalCell& c = cell(at);
    const uint64_t own = view.local_stamp | local_mask(at, address_of(p), bytes) | atomic;
    const auto conflicts = [&](uint64_t other) {
      if (!(other & own & kLocalMask) || (other & own & kLocalAtomic)) return false;
      return !ordered(other, view, warp);
    };
    const auto race = [&](uint64_t other, uint64_t other_info, bool stored) {
      return Race{view.local_stamp, info, other, other_info, access, stored, p, at, base, shared};
    };
    const auto report = [&](uint64_t other, uint64_t other_info, bool stored) {
      if (wrong.empty() && !is_benign(at)) wrong = text(race(other, other_info, stored));
    };
    // As in PTX, an atomic store comes before the thread if an atomic load that found its value does.
    const auto observed = [&] {
      return std::any_of(c.load, c.load + 2, [&](uint64_t load) {
        return load & kLocalAtomic && !is_local_put(load) && !(own & c.store & ~load & kLocalMask) &&
               ordered(load, view, warp);
      });
    };
    if (conflicts(c.store) && !(c.store & kLocalAtomic && observed())) {
      const bool both_store = access == LocalAccess::store && !(c.store & kLocalAtomic) && !is_call(name) &&
                              !is_call(name_of(c.store_info));
      if (!both_store) {
        report(c.store, c.store_info, true);
      } else if (!latest_.p && !is_benign(at)) {
        latest_ = race(c.store, c.store_info, true);
        before_it_.assign(static_cast<const char*>(p), bytes);
      }
    }
    if (loads) {
      local_loaded(c, own, info);
      continue;
    }
    for (int i = 0; i < 2; ++i)
      if (conflicts(c.load[i])) report(c.load[i], c.load_info[i], false);
    local_stored(c, own, info);
  }
  return wrong;
}

const char* LocalAccesses::named(const Call& call, int line) {
  return names_.insert(kCall + order_.typed_name(call, line)).first->c_str();
}

std::string LocalAccesses::copied(Thread& view, uint32_t warp, const Call& call, bool source, uint64_t put,
                                  SharedRange shared) {
  std::string wrong;
  const char* name = named(call, view.site);
  const uint64_t bytes = static_cast<uint64_t>(call.bytes), info = info_of(name, view);
  uint64_t before = ~0ull; // the put that still reads all of these bytes
  call.each_row([&](const void* to, const void* from) {
    const void* p = source ? from : to;
    const std::string found = accessed(view, warp, p, bytes, source ? LocalAccess::load : LocalAccess::store, name,
                                       source ? call.source : call.destination, shared);
    if (wrong.empty()) wrong = found;
    for (uint64_t at = address_of(p) / 4 * 4; put && at < address_of(p) + bytes; at += 4) {
      LocalCell& c = cell(at);
      const uint64_t other = is_local_put(c.load[1]) ? c.load[1] & ~kLocalMask : 0;
      before = before == ~0ull || before == other ? other : 0;
      c.load[1] = put_stamp(put) | local_mask(at, address_of(p), bytes);
      c.load_info[1] = info;
    }
  });
  if (put && before != ~0ull && is_local_put(before)) order_.replaces(put, epoch_of_stamp(before), warp, view.lane);
  return wrong;
}

std::string LocalAccesses::stored() {
  if (!latest_.p) return "";
  const bool same = !memcmp(latest_.p, before_it_.data(), before_it_.size());
  const Race race = latest_;
  latest_.p = nullptr;
  return same ? "" : text(race);
}

std::string LocalAccesses::line(unsigned site) const { return in_brackets(lines_, static_cast<int>(site) - 1); }

std::string LocalAccesses::thread_of(uint64_t stamp) const {
  const uint32_t warp = warp_of_stamp(stamp);
  return concat("block ", warp / warps_per_block_, " thread ", warp % warps_per_block_ * 32 + lane_of_stamp(stamp));
}

std::string LocalAccesses::text(const Race& race) const {
  const auto& [own, info, other, other_info, access, stored, p, at, base, shared] = race;
  const char *name = name_of(info), *other_name = name_of(other_info);
  const auto verb = [](bool atomic, bool store, const char* name) -> std::string {
    if (is_call(name)) return name + 1;
    return std::string(atomic  ? store ? "an atomic operation on " : "an atomic load of "
                       : store ? "a store to "
                               : "a load of ") +
           (name ? name : "a word");
  };
  const uint64_t begin = std::max(at, address_of(p));
  const std::string where = address_of(p) - shared.begin < shared.bytes ? " (shared memory)"
                            : order_.in_heap(p)                         ? ""
                                                                        : " (memory of this rank)";
  const uint32_t by = warp_of_stamp(other);
  const bool all_store = stored && access == LocalAccess::store && other_info >> 48 == info >> 48;
  const char* advice = is_local_put(other)
                           ? "N.quiet, or a signal of the target that it has the data and a wait for it (or "
                             "T.sync_threads() before the put, if it is meant to send what is stored), is missing"
                       : by == warp_of_stamp(own) ? "T.sync_warp() or T.sync_threads() is missing"
                       : by / warps_per_block_ == warp_of_stamp(own) / warps_per_block_
                           ? "T.sync_threads() is missing"
                           : "a barrier of the grid, or another synchronisation of the two blocks (a release and an "
                             "acquire of scope \"gpu\"; relaxed accesses order nothing), is missing";
  const std::string second = verb(other & kLocalAtomic, stored, other_name);
  return concat(
      verb(access >= LocalAccess::atomic, access == LocalAccess::store || access == LocalAccess::atomic, name), where,
      line(static_cast<unsigned>(info >> 48)), " by ", thread_of(own), " touches bytes ",
      base ? begin - address_of(base) : 0, " to ",
      (base ? begin - address_of(base) : 0) + static_cast<uint64_t>(__builtin_popcountll(other & kLocalMask)),
      is_call(name) ? access == LocalAccess::store ? " of its destination" : " of its source" : " of it",
      ", and so does ", second, line(static_cast<unsigned>(other_info >> 48)), " by ",
      is_local_put(other) ? order_.thread_of_transfer(epoch_of_stamp(other)) : thread_of(other),
      ", and nothing orders the two: ", advice, " between them",
      all_store ? "; or, where they all store at a time, one thread is to store (if tx == 0), or N.benign_race "
                  "declares that any of the values will do"
                : "");
}

} // namespace tsn::sim
