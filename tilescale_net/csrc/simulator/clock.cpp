#include "clock.h"

namespace tsn::sim {

Known nothing_known() {
  static const Known nothing = std::make_shared<Clock>();
  return nothing;
}

uint32_t epoch_of(const Known& known, Key key) {
  const auto it = std::lower_bound(known->begin(), known->end(), std::make_pair(key, 0u));
  return it != known->end() && it->first == key ? it->second : 0;
}

uint32_t rank_known(const Known& known, int rank) {
  return std::max(epoch_of(known, clock_key(Part::all, rank)), epoch_of(known, clock_key(Part::ended, rank)));
}

uint32_t steps_known(const Known& known, int rank, uint32_t warp, unsigned lane) {
  const uint32_t all = epoch_of(known, steps_key(rank, warp));
  return lane < kEveryLane ? std::max(all, epoch_of(known, steps_key(rank, warp, lane))) : all;
}

Known without_lanes(const Known& known) {
  auto out = std::make_shared<Clock>();
  out->reserve(known->size());
  Key warp = 0;
  uint32_t all = 0;
  for (const auto& entry : *known) {
    const bool of_steps = part_of(entry.first) == Part::steps;
    if (of_steps && !word_of(entry.first)) warp = entry.first, all = entry.second; // comes before its lanes
    const bool of_lane = of_steps && word_of(entry.first);
    if (!of_lane || entry.first - word_of(entry.first) != warp || entry.second > all) out->push_back(entry);
  }
  return out->size() == known->size() ? known : out;
}

Known join(const Known& a, const Known& b) {
  if (covers(a, b)) return a;
  if (a->empty()) return b;
  auto out = std::make_shared<Clock>();
  out->reserve(a->size() + b->size());
  auto i = a->begin(), j = b->begin();
  while (i != a->end() && j != b->end()) {
    if (i->first < j->first) out->push_back(*i++);
    else if (j->first < i->first) out->push_back(*j++);
    else out->emplace_back(i->first, std::max(i->second, j->second)), ++i, ++j;
  }
  out->insert(out->end(), i, a->end());
  out->insert(out->end(), j, b->end());
  return out;
}

bool join_in_place(Known& known, const Clock& entries) {
  bool of_warp = false;
  for (const auto& entry : entries) {
    if (epoch_of(known, entry.first) >= entry.second) continue;
    if (known.use_count() > 1) known = std::make_shared<Clock>(*known);
    Clock& own = const_cast<Clock&>(*known);
    const auto at = std::lower_bound(own.begin(), own.end(), std::make_pair(entry.first, 0u));
    if (at != own.end() && at->first == entry.first) at->second = entry.second;
    else own.insert(at, entry);
    of_warp |= part_of(entry.first) == Part::steps && !word_of(entry.first);
  }
  return of_warp;
}

bool covers(const Known& a, const Known& b) {
  if (a == b || b->empty()) return true;
  if (b->size() == 1) return epoch_of(a, b->front().first) >= b->front().second;
  auto i = a->begin();
  for (const auto& entry : *b) {
    while (i != a->end() && i->first < entry.first) ++i;
    if (i == a->end() || i->first != entry.first || i->second < entry.second) return false;
  }
  return true;
}

} // namespace tsn::sim
