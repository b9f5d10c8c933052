#include "history.h"

#include "tilescale_net/device/types.h"

#include <algorithm>

namespace tsn::explore {

bool independent(const Footprint& a, const Footprint& b) {
  auto i = a.begin(), j = b.begin();
  while (i != a.end() && j != b.end()) {
    if (i->place < j->place) {
      ++i;
    } else if (j->place < i->place) {
      ++j;
    } else {
      // All uses of the place by either.
      const uint64_t place = i->place;
      auto j_end = j;
      while (j_end != b.end() && j_end->place == place) ++j_end;
      for (; i != a.end() && i->place == place; ++i)
        for (auto k = j; k != j_end; ++k)
          if (i->use != k->use || i->use == Use::write) return false;
      j = j_end;
    }
  }
  return true;
}

bool comes_before(int event, int process, const Past& past) {
  const size_t p = static_cast<size_t>(process);
  return past && p < past->size() && (*past)[p] >= event;
}

Past joined(const Past& a, const Past& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto out = std::make_shared<std::vector<int32_t>>(*a);
  if (out->size() < b->size()) out->resize(b->size(), -1);
  for (size_t i = 0; i < b->size(); ++i) (*out)[i] = std::max((*out)[i], (*b)[i]);
  return out;
}

Past with_event(const Past& past, int process, int event) {
  auto out = past ? std::make_shared<std::vector<int32_t>>(*past) : std::make_shared<std::vector<int32_t>>();
  const size_t p = static_cast<size_t>(process);
  if (out->size() <= p) out->resize(p + 1, -1);
  (*out)[p] = event;
  return out;
}

bool Condition::holds(uint64_t word) const {
  const int64_t seen = static_cast<int64_t>(word);
  switch (static_cast<Compare>(comparison)) {
  case Compare::eq:
    return seen == wanted;
  case Compare::ne:
    return seen != wanted;
  case Compare::ge:
    return seen >= wanted;
  case Compare::gt:
    return seen > wanted;
  case Compare::le:
    return seen <= wanted;
  default:
    return seen < wanted;
  }
}

void History::clear() {
  processes_.clear();
  cells_.clear();
  changes_.clear();
  waits_.clear();
  races_.clear();
  footprint_.clear();
}

int History::begin(int process, const Past& past) {
  processes_.push_back(process);
  past_ = with_event(past, process, now());
  apart_ = false;
  races_.clear();
  footprint_.clear();
  return now();
}

bool History::are_earlier(const std::vector<int>& events, const Past& past) const {
  return std::all_of(events.begin(), events.end(), [&](int event) { return is_earlier(event, past); });
}

void History::learn(const std::vector<Touched>& earlier, Past& past, bool races) {
  for (const Touched& t : earlier) {
    if (t.event == now() || is_earlier(t.event, past)) continue;
    if (races) races_.push_back({t.event, apart_});
    past = joined(past, t.past);
  }
}

void History::touch(uint64_t place, Use use, Past& past, bool races, bool waits) {
  footprint_.push_back({place, use});
  Cell& cell = cells_[place];
  learn(cell.writes, past, races);
  if (use != Use::read) learn(cell.reads, past, races);
  if (use != Use::add) learn(cell.adds, past, races);
  if (use != Use::read && waits) learn(cell.waits, past, races);
  past_ = joined(past_, past);
  if (use == Use::write) {
    cell.reads.clear();
    cell.adds.clear();
    cell.writes.assign(1, {now(), past});
    return;
  }
  std::vector<Touched>& list = use == Use::read ? cell.reads : cell.adds;
  for (Touched& t : list)
    if (t.event == now()) {
      t.past = joined(t.past, past);
      return;
    }
  list.push_back({now(), past});
}

void History::touch(uint64_t place, Use use, Past& past, bool races) { touch(place, use, past, races, true); }

void History::touch(uint64_t address, uint64_t bytes, Use use, Past& past) {
  for (uint64_t place = address / 4; place <= (address + bytes - 1) / 4; ++place) touch(place, use, past, true);
}

// A finished wait tolerates a change after which the word still satisfies it, if the change could not have ended the
// wait instead of an earlier one: it comes after all of those.
void History::change(const uint64_t* word, Change::Kind kind, uint64_t value, Past& past) {
  const uint64_t after = kind == Change::add ? *word + value : value;
  const auto found = waits_.find(word);
  if (found != waits_.end())
    for (const Wait& wait : found->second) {
      const bool minds = wait.looks || kind == Change::other || !wait.condition.holds(after);
      if (minds || !are_earlier(wait.led_to, past)) learn({wait.touched}, past, true);
    }
  const uint64_t place = reinterpret_cast<uint64_t>(word) / 4;
  const Use use = kind == Change::add ? Use::add : Use::write;
  touch(place, use, past, true, false);
  touch(place + 1, use, past, true, false);
  changes_[word].push_back({now(), kind, *word, value, past});
}

// A change without which the word would not lose the awaited value could have come after the wait. Any other
// unordered change could not: the wait would not have ended. Either way it counts as before the wait from here on.
void History::seen(const uint64_t* word, const Condition& condition, bool looks, Past& past) {
  const Past before = past;
  std::vector<int> led_to;
  const std::vector<Change>& changes = changes_[word];
  size_t last = changes.size(); // after these the word had the awaited value, up to now
  while (last && condition.holds(changes[last - 1].before)) --last;
  for (size_t i = 0; i < last; ++i) led_to.push_back(changes[i].event);
  for (size_t i = 0; i < changes.size(); ++i) {
    const Change& c = changes[i];
    if (is_earlier(c.event, before)) continue;
    if (i >= last && !looks && c.kind != Change::other && are_earlier(led_to, c.past)) continue; // as in `change`
    if (condition.holds(c.kind == Change::add ? *word - c.value : c.before)) races_.push_back({c.event, apart_});
    past = joined(past, c.past);
  }
  const uint64_t place = reinterpret_cast<uint64_t>(word) / 4;
  for (uint64_t p = place; p < place + 2; ++p) {
    footprint_.push_back({p, Use::read});
    cells_[p].waits.push_back({now(), past});
  }
  past_ = joined(past_, past);
  waits_[word].push_back({{now(), past}, condition, looks, led_to});
}

Footprint History::footprint() {
  std::sort(footprint_.begin(), footprint_.end());
  footprint_.erase(std::unique(footprint_.begin(), footprint_.end()), footprint_.end());
  return footprint_;
}

} // namespace tsn::explore
