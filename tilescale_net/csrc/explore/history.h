// The places that events of one execution have touched, their order, and possible reorderings.
//
// An event is everything between two decisions of the scheduler. Two events are dependent if both touch a place and
// one of them changes it, except two additions to a word. Of two unordered dependent events the later one could have
// come first: a race in the sense of partial order reduction (Flanagan and Godefroid, POPL 2005), which right kernels
// have too, if signals of several senders go to one word.
#pragma once

#include "tilescale_net/csrc/simulator/scheduler.h"

#include <unordered_map>
#include <vector>

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
bool independent(const Footprint& a, const Footprint& b);

bool comes_before(int event, int process, const Past& past);
Past joined(const Past& a, const Past& b);
Past with_event(const Past& past, int process, int event);

struct Condition {
  uint32_t comparison; // Compare of device/types.h
  int64_t wanted;
  bool holds(uint64_t word) const;
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
  void clear();
  // Begins event `number`; its process knows `past`.
  int begin(int process, const Past& past);
  // Events that precede it: also those its accesses have added so far.
  const Past& past() const { return past_; }
  // Whether the next accesses are by a thread that the event has released.
  void learn(const Past& past) { past_ = joined(past_, past); }
  void set_apart(bool apart) { apart_ = apart; }
  int process_of(int event) const { return processes_[event]; }

  // An actor that knows `past` touches the bytes, or one place, and learns from that.
  void touch(uint64_t address, uint64_t bytes, Use use, Past& past);
  void touch(uint64_t place, Use use, Past& past, bool races = true);
  // The word is about to be changed.
  void change(const uint64_t* word, Change::Kind kind, uint64_t value, Past& past);
  // A wait has seen its value. `looks`: the thread uses the value itself.
  void seen(const uint64_t* word, const Condition& condition, bool looks, Past& past);

  // Of the event in progress.
  std::vector<Race>& races() { return races_; }
  Footprint footprint();

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
  bool are_earlier(const std::vector<int>& events, const Past& past) const;
  void touch(uint64_t place, Use use, Past& past, bool races, bool waits);
  void learn(const std::vector<Touched>& earlier, Past& past, bool races);

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
