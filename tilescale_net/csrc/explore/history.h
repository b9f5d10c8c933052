// The places that events of one execution have touched, their order, and possible reorderings.
//
// An event is everything between two decisions of the scheduler. Two events are dependent if both touch a place and
// one of them changes it, except two additions to a word. Of two unordered dependent events the later one could have
// come first: a race in the sense of partial order reduction (Flanagan and Godefroid, POPL 2005), which right kernels
// have too, if signals of several senders go to one word.
#pragma once

#include "tilescale_net/csrc/simulator/scheduler.h"
#include "tilescale_net/device/types.h"

namespace tsn::explore {

using sim::Past;

enum class Use : uint8_t { read, write, add };

struct Piece {
  uint64_t place; // an address / 4, or the number of another object, from kOther on
  Use use;
  bool operator<(const Piece& o) const { return place != o.place ? place < o.place : use < o.use; }
  bool operator==(const Piece& o) const { return place == o.place && use == o.use; }
};
constexpr uint64_t kOther = 1ull << 63;

using Footprint = std::vector<Piece>; // sorted, each piece once

inline bool independent(const Footprint& a, const Footprint& b) {
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

inline bool comes_before(int event, int process, const Past& past) {
  const size_t p = static_cast<size_t>(process);
  return past && p < past->size() && (*past)[p] >= event;
}

inline Past joined(const Past& a, const Past& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto out = std::make_shared<std::vector<int32_t>>(*a);
  if (out->size() < b->size()) out->resize(b->size(), -1);
  for (size_t i = 0; i < b->size(); ++i) (*out)[i] = std::max((*out)[i], (*b)[i]);
  return out;
}

inline Past with_event(const Past& past, int process, int event) {
  auto out = past ? std::make_shared<std::vector<int32_t>>(*past) : std::make_shared<std::vector<int32_t>>();
  const size_t p = static_cast<size_t>(process);
  if (out->size() <= p) out->resize(p + 1, -1);
  (*out)[p] = event;
  return out;
}

struct Condition {
  uint32_t comparison; // Compare of device/types.h
  int64_t wanted;
  bool holds(uint64_t word) const {
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
};

// Change of a synchronisation word: set to a value, a value added, or unknown.
struct Change {
  enum Kind { set, add, other };
  int event;
  Kind kind;
  uint64_t before, value;
  Past past;
};

// The event `first` could have come after the one in progress.
struct Race {
  int first;
  bool apart; // for accesses of threads that the event has released
};

class History {
public:
  void clear() {
    processes_.clear();
    cells_.clear();
    changes_.clear();
    waits_.clear();
    races_.clear();
    footprint_.clear();
  }
  // Begins event `number`; its process knows `past`.
  int begin(int process, const Past& past) {
    processes_.push_back(process);
    past_ = with_event(past, process, now());
    apart_ = false;
    races_.clear();
    footprint_.clear();
    return now();
  }
  // Events that precede it: also those its accesses have added so far.
  const Past& past() const { return past_; }
  // Whether the next accesses are by a thread that the event has released.
  void learn(const Past& past) { past_ = joined(past_, past); }
  void set_apart(bool apart) { apart_ = apart; }
  int process_of(int event) const { return processes_[event]; }

  // An actor that knows `past` touches the bytes, or one place, and learns from that.
  void touch(uint64_t address, uint64_t bytes, Use use, Past& past) {
    for (uint64_t place = address / 4; place <= (address + bytes - 1) / 4; ++place) touch(place, use, past, true);
  }
  void touch(uint64_t place, Use use, Past& past, bool races = true) { touch(place, use, past, races, true); }
  // The word is about to be changed.
  // A finished wait tolerates a change after which the word still satisfies it, if the change could not have ended the
  // wait instead of an earlier one: it comes after all of those.
  void change(const uint64_t* word, Change::Kind kind, uint64_t value, Past& past) {
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
  // A wait has seen its value. `looks`: the thread uses the value itself.
  // A change without which the word would not lose the awaited value could have come after the wait. Any other
  // unordered change could not: the wait would not have ended. Either way it counts as before the wait from here on.
  void seen(const uint64_t* word, const Condition& condition, bool looks, Past& past) {
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

  // Of the event in progress.
  std::vector<Race>& races() { return races_; }
  Footprint footprint() {
    std::sort(footprint_.begin(), footprint_.end());
    footprint_.erase(std::unique(footprint_.begin(), footprint_.end()), footprint_.end());
    return footprint_;
  }

private:
  struct Touched {
    int event;
    Past past;
  };
  struct Cell {
    std::vector<Touched> writes, reads, adds; // at most one write, and later accesses
    std::vector<Touched> waits;               // for the word
  };
  struct Wait {
    Touched touched;
    Condition condition;
    bool looks;
    std::vector<int> led_to; // the changes that it has waited for
  };
  int now() const { return static_cast<int>(processes_.size()) - 1; }
  bool is_earlier(int event, const Past& past) const { return comes_before(event, process_of(event), past); }
  bool are_earlier(const std::vector<int>& events, const Past& past) const {
    return std::all_of(events.begin(), events.end(), [&](int event) { return is_earlier(event, past); });
  }
  void touch(uint64_t place, Use use, Past& past, bool races, bool waits) {
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
  void learn(const std::vector<Touched>& earlier, Past& past, bool races) {
    for (const Touched& t : earlier) {
      if (t.event == now() || is_earlier(t.event, past)) continue;
      if (races) races_.push_back({t.event, apart_});
      past = joined(past, t.past);
    }
  }

  std::vector<int> processes_;
  std::unordered_map<uint64_t, Cell> cells_;
  std::unordered_map<const uint64_t*, std::vector<Change>> changes_;
  std::unordered_map<const uint64_t*, std::vector<Wait>> waits_;
  std::vector<Race> races_;
  Past past_;
  bool apart_ = false;
  Footprint footprint_;
};

} // namespace tsn::explore
