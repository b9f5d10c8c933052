// Runs a job under many schedules: all different ones, random ones, or one again.
#pragma once

#include "job.h"
#include "tilescale_net/csrc/simulator/random.h"
#include "tilescale_net/csrc/simulator/rules.h"

namespace tsn::explore {

constexpr double kStallSeconds = 20; // of an event
inline bool has(const std::vector<int>& list, int value) { return std::binary_search(list.begin(), list.end(), value); }

class Deadline {
public:
  explicit Deadline(double seconds) : seconds_(seconds), began_(std::chrono::steady_clock::now()) {}
  double left() const {
    return seconds_ - std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }
  double of_event() const { return std::min(kStallSeconds, std::max(1.0, left())); }

private:
  double seconds_;
  std::chrono::steady_clock::time_point began_;
};

struct Limits {
  uint64_t schedules = ~0ull;
  double seconds = 1e9;
  int preemptions = -1; // at most; -1: any number
  bool reduce = true;   // omit schedules that differ only in the order of independent events
};

struct Result {
  uint64_t schedules = 0; // executions that ran to their end
  uint64_t cut = 0;       // executions given up because they would have repeated others
  uint64_t states = 0;    // of memory at the end, that differ
  uint64_t events = 0;    // of the longest execution
  bool complete = false;
  std::vector<std::string> not_followed; // operations whose other orders are not explored
  std::string failure;                   // empty: no failure
  int gave_up = -1;                      // the rank whose record holds the reason
  uint64_t seed = 0;                     // of the failure
  int preemptions = 0;                   // of the failing schedule
  std::vector<int> schedule;
  std::vector<std::string> texts;
};

class Explorer {
public:
  // `holds` returns an error of the final memory, or nothing; it is called once per final state.
  Explorer(Setup setup, std::function<std::string()> holds, std::function<bool()> interrupted)
      : job_(std::move(setup)), holds_(std::move(holds)), interrupted_(std::move(interrupted)) {}

  // Every schedule, except schedules that differ only in the order of independent events. The first failure ends it.
  Result all(const Limits& limits) {
    const Deadline deadline(limits.seconds);
    const auto left = [&] { return deadline.left(); };
    Result result;
    most_preemptions_ = limits.preemptions;
    reduces_ = limits.reduce;
    path_.clear();
    size_t known = 0; // number of events of the previous execution
    for (bool more = true; more; more = go_back(), known = path_.size()) {
      if (result.schedules + result.cut >= limits.schedules || left() <= 0 || interrupted_()) return result;
      job_.limit_event(deadline.of_event());
      job_.restart(false);
      for (size_t depth = 0;; ++depth) {
        if (depth >= path_.size() && at_end(result)) {
          if (job_.stalled() && left() <= 0) result.failure.clear();
          else if (depth < sim::kMaxDecisions || !result.failure.empty()) ++result.schedules;
          if (depth >= sim::kMaxDecisions || left() <= 0) return result;
          break;
        }
        if (depth % 64 == 63 && (left() <= 0 || interrupted_())) return result;
        enter(depth);
        Node& node = path_[depth];
        if (node.chosen < 0) {
          ++result.cut;
          path_.pop_back();
          break;
        }
        job_.step(node.chosen);
        if (Job::Loop loop = job_.new_loop(); loop.process >= 0) {
          std::vector<int> schedule;
          for (size_t i = 0; i <= depth; ++i) schedule.push_back(path_[i].chosen);
          loops_.emplace_back(std::move(schedule), std::move(loop));
        }
        const int event = static_cast<int>(depth);
        const std::vector<Race> races = job_.history().races();
        path_[depth].footprint = job_.history().footprint();
        if (depth + 1 >= known)
          for (const Race& race : races) add_for(race, event);
      }
      if (!result.failure.empty()) return result;
    }
    try_loops(result);
    result.complete = limits.preemptions < 0 && result.not_followed.empty();
    return result;
  }
  // Schedules by random priorities that change `depth` - 1 times (Burckhardt et al., ASPLOS 2010).
  Result random(uint64_t first_seed, uint64_t seeds, int depth, double seconds = 1e9) {
    Result result;
    const Deadline deadline(seconds);
    uint64_t steps = 50; // of an execution, as far as known
    for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
      if (deadline.left() <= 0 || interrupted_()) return result;
      job_.limit_event(deadline.of_event());
      sim::Random random(seed);
      std::map<size_t, int> changes; // the steps at which the running process gets a low priority, and which
      for (int i = 1; i < depth; ++i) changes[random.below(steps)] = -i;
      std::map<int, int64_t> priority;
      path_.clear();
      job_.restart(false);
      while (!at_end(result)) {
        Node node;
        node.enabled = job_.enabled();
        for (int p : node.enabled)
          if (!priority.count(p)) priority[p] = static_cast<int64_t>(random.below(1ull << 40));
        const auto less = [&](int a, int b) { return priority[a] < priority[b]; };
        const auto pick = [&] { return *std::max_element(node.enabled.begin(), node.enabled.end(), less); };
        node.chosen = pick();
        if (const auto change = changes.find(path_.size()); change != changes.end()) {
          priority[node.chosen] = change->second;
          node.chosen = pick();
        }
        follow(node);
        path_.push_back(node);
        job_.step(node.chosen);
        if (path_.size() % 64 == 0 && (deadline.left() <= 0 || interrupted_())) return result;
      }
      if (job_.stalled() && deadline.left() <= 0) {
        result.failure.clear();
        return result;
      }
      ++result.schedules;
      steps = std::max<uint64_t>(result.events, 1);
      result.seed = seed;
      if (!result.failure.empty()) return result;
    }
    return result;
  }
  // This schedule, then any continuation. Throws std::invalid_argument if it does not fit.
  Result repeat(const std::vector<int>& schedule, double seconds = 1e9) {
    Result result;
    const Deadline deadline(seconds);
    most_preemptions_ = -1;
    path_.clear();
    job_.limit_event(deadline.of_event());
    job_.restart(true);
    while (!at_end(result) && deadline.left() > 0) {
      Node node;
      node.enabled = job_.enabled();
      const size_t depth = path_.size();
      follow(node);
      node.chosen = depth < schedule.size() ? schedule[depth] : usual(node);
      if (!has(node.enabled, node.chosen))
        throw std::invalid_argument(
            concat("decision ", depth, " of the schedule is for process ", node.chosen, ", which cannot go on there"));
      path_.push_back(node);
      job_.step(node.chosen);
    }
    result.schedules = 1;
    result.texts = job_.texts();
    result.schedule.clear();
    for (const Node& node : path_) result.schedule.push_back(node.chosen);
    return result;
  }

private:
  struct Node {
    std::vector<int> enabled;
    int chosen = -1;
    std::set<int> wanted;            // to be tried here
    std::map<int, Footprint> asleep; // would repeat tried ones
    Footprint footprint;             // of the chosen one
    int64_t block = -1;              // that ran last
    int preemptions = 0;             // so far
  };

  // Makes the node of the next decision, or finds an earlier execution's.
  void enter(size_t depth) {
    if (depth < path_.size()) return;
    Node node;
    node.enabled = job_.enabled();
    if (depth && reduces_)
      for (const auto& [process, footprint] : path_.back().asleep)
        if (process != path_.back().chosen && independent(footprint, path_.back().footprint))
          node.asleep.emplace(process, footprint);
    follow(node);
    node.chosen = usual(node);
    if (node.chosen >= 0) node.wanted.insert(node.chosen);
    if (!reduces_) node.wanted.insert(node.enabled.begin(), node.enabled.end());
    path_.push_back(std::move(node));
  }
  // A new node's state from the previous one.
  void follow(Node& node) const {
    if (path_.empty()) return;
    const Node& last = path_.back();
    const int64_t block = job_.block_of(last.chosen);
    node.block = block < 0 ? last.block : block;
    node.preemptions = last.preemptions + cost(last, last.chosen);
  }
  // The last block continues, then another; operations in flight arrive when nothing else can happen.
  int usual(const Node& node) const {
    int best = -1, best_rank = 4;
    for (int p : node.enabled) {
      if (node.asleep.count(p) || !affordable(node, p)) continue;
      const int64_t block = job_.block_of(p);
      const int rank = block < 0 ? 2 : block == node.block ? 0 : 1;
      if (rank < best_rank) best = p, best_rank = rank;
    }
    return best;
  }
  // Cost of leaving a runnable block; arrivals cost nothing.
  int cost(const Node& node, int process) const {
    const int64_t block = job_.block_of(process);
    if (node.block < 0 || block < 0 || block == node.block) return 0;
    return std::any_of(node.enabled.begin(), node.enabled.end(), [&](int p) { return job_.block_of(p) == node.block; });
  }
  bool affordable(const Node& node, int process) const {
    return most_preemptions_ < 0 || node.preemptions + cost(node, process) <= most_preemptions_;
  }
  // Source sets (Abdulla et al., POPL 2014): one of the processes that can begin the events which followed the first
  // event of a race without it, and led to the second.
  void add_for(const Race& race, int event) {
    size_t at = static_cast<size_t>(race.first);
    if (most_preemptions_ >= 0) { // also if no preemption is needed (Coons et al., OOPSLA 2013)
      while (at && path_[at].block == path_[at - 1].block) --at;
      path_[at].wanted.insert(path_[at].enabled.begin(), path_[at].enabled.end());
    }
    Node& node = path_[race.first];
    const History& history = job_.history();
    const int first_process = history.process_of(race.first);
    std::vector<int> between;
    std::set<int> seen, initial;
    const auto look = [&](int e, const Past& past) {
      const int process = history.process_of(e);
      const bool follows = std::any_of(between.begin(), between.end(),
                                       [&](int b) { return comes_before(b, history.process_of(b), past); });
      if (seen.insert(process).second && !follows && has(node.enabled, process)) initial.insert(process);
      between.push_back(e);
    };
    for (int e = race.first + 1; e < event; ++e)
      if (!comes_before(race.first, first_process, job_.past_of(e))) look(e, job_.past_of(e));
    look(event, job_.past_of(event)); // all that it has touched: events between that it needs may come after the race
    if (race.apart) initial.clear();
    for (int process : initial)
      if (node.wanted.count(process)) return;
    if (initial.empty()) node.wanted.insert(node.enabled.begin(), node.enabled.end());
    else node.wanted.insert(*initial.begin());
  }
  // Backtracks to the last decision with an untried choice. False: none is left.
  bool go_back() {
    for (; !path_.empty(); path_.pop_back()) {
      Node& node = path_.back();
      if (node.chosen >= 0) node.asleep[node.chosen] = std::move(node.footprint);
      for (int process : node.wanted) {
        if (node.asleep.count(process) || !affordable(node, process)) continue;
        node.chosen = process;
        return true;
      }
    }
    return false;
  }
  // Whether the execution has reached its end, or a failure, which it records.
  bool at_end(Result& result) {
    const size_t events = path_.size();
    result.failure = job_.failure();
    const std::set<std::string> gaps = job_.not_followed();
    result.not_followed.assign(gaps.begin(), gaps.end());
    result.gave_up = job_.gave_up();
    const bool blocked = result.failure.empty() && job_.enabled().empty();
    if (blocked && !job_.ended()) result.failure = "deadlock: no thread can go on: " + job_.waits();
    else if (blocked) result.failure = judge();
    const bool too_long = !blocked && result.failure.empty() && events >= sim::kMaxDecisions;
    if (too_long) result.not_followed.push_back(sim::gap_text(sim::Gap::decisions));
    if (!blocked && result.failure.empty() && !too_long) return false;
    result.events = std::max<uint64_t>(result.events, events);
    result.states = judged_.size();
    if (result.failure.empty()) return true;
    result.schedule.clear();
    for (const Node& node : path_) result.schedule.push_back(node.chosen);
    if (!path_.empty()) result.preemptions = path_.back().preemptions + cost(path_.back(), path_.back().chosen);
    result.texts = job_.texts();
    return true;
  }
  // Finds out whether polling loops end without a change: their steps then, while others could run, are not explored.
  void try_loops(Result& result) {
    for (const auto& [schedule, loop] : loops_) {
      job_.restart(false);
      for (int process : schedule) job_.step(process);
      job_.poll_in_vain(loop);
    }
    const std::set<std::string> gaps = job_.not_followed();
    result.not_followed.assign(gaps.begin(), gaps.end());
  }
  std::string judge() {
    const uint64_t digest = job_.digest();
    const auto known = judged_.find(digest);
    if (known != judged_.end()) return known->second;
    return judged_[digest] = holds_();
  }

  Job job_;
  std::function<std::string()> holds_;
  std::function<bool()> interrupted_;
  std::map<uint64_t, std::string> judged_; // by digest of memory
  std::vector<Node> path_;
  std::vector<std::pair<std::vector<int>, Job::Loop>> loops_; // schedules up to where a loop polls
  int most_preemptions_ = -1;
  bool reduces_ = true;
};

} // namespace tsn::explore
