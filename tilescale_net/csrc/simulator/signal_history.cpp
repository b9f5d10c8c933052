#include "race_memory.h"

#include <algorithm>
#include <map>

namespace tsn {
namespace sim {

namespace {
constexpr size_t kMaxSteps = 1024; // of a word; with more, whoever has seen it knows all of them
} // namespace

void SignalHistory::add(const Message& message, const Known& sent) {
  (message.add ? adds_ : sets_) = true;
  all_ = join(all_, sent);
  if (!whole_) return;
  steps_.push_back({message.rank, message.epoch, static_cast<int64_t>(message.value), sent});
  if (steps_.size() <= kMaxSteps) return;
  whole_ = false;
  steps_.clear();
}

Known SignalHistory::guaranteed(const Seen& seen, int64_t now) const {
  if (seen.any || !whole_ || (adds_ && sets_) || steps_.empty()) return all_;
  std::map<int, int64_t> sums;
  int64_t total = 0;
  for (const Step& step : steps_) sums[step.rank] += step.value, total += step.value;
  Known known = nothing_known();
  if (sets_) {
    if (sums.size() > 1) return all_;
    for (const Step& step : steps_) {
      known = join(known, step.known);
      if (seen.exactly ? step.value == seen.value : step.value >= seen.value) return known;
    }
    return all_;
  }
  // Of each sender as much as the word lacks when all others have added what they have added so far. The word may have
  // begun with another value than 0, and may not have everything yet.
  const int64_t needed = seen.value - now + total;
  for (const auto& [rank, sum] : sums) {
    int64_t lacks = needed - (total - sum);
    for (const Step& step : steps_) {
      if (lacks <= 0) break;
      if (step.rank != rank) continue;
      known = join(known, step.known);
      lacks -= step.value;
    }
  }
  return known;
}

bool SignalHistory::forget(const std::vector<uint32_t>& ended) {
  auto rest = std::make_shared<Clock>();
  for (const auto& entry : *all_)
    if (entry.second > ended[static_cast<size_t>(rank_of(entry.first))]) rest->push_back(entry);
  all_ = rest;
  // The host may have given the word another value since.
  const auto old = [&](const Step& step) { return step.epoch <= ended[static_cast<size_t>(step.rank)]; };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), old), steps_.end());
  return !rest->empty();
}

} // namespace sim
} // namespace tsn
