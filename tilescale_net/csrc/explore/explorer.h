// Runs a job under many schedules: all different ones, random ones, or one again.
#pragma once

#include "job.h"

#include <functional>
#include <set>

namespace tsn::explore {

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
  Explorer(Setup setup, std::function<std::string()> holds, std::function<bool()> interrupted);

  // Every schedule, except schedules that differ only in the order of independent events. The first failure ends it.
  Result all(const Limits& limits);
  // Schedules by random priorities that change `depth` - 1 times (Burckhardt et al., ASPLOS 2010).
  Result random(uint64_t first_seed, uint64_t seeds, int depth, double seconds = 1e9);
  // This schedule, then any continuation. Throws std::invalid_argument if it does not fit.
  Result repeat(const std::vector<int>& schedule, double seconds = 1e9);

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

  void enter(size_t depth);
  void follow(Node& node) const;
  int usual(const Node& node) const;
  int cost(const Node& node, int process) const;
  bool affordable(const Node& node, int process) const;
  void add_for(const Race& race, int event);
  // Backtracks to the last decision with an untried choice. False: none is left.
  bool go_back();
  // Whether the execution has reached its end, or a failure, which it records.
  bool at_end(Result& result);
  // Finds out whether polling loops end without a change: their steps then, while others could run, are not explored.
  void try_loops(Result& result);
  std::string judge();

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
