#include "race_memory.h"

#include <algorithm>
#include <map>

namespace tsn {
namespace sim {

namespace {
constexpr size_t kMaxSteps = 1024; // of a word; with more, a thread that has seen it knows all of them
} // namespace

void SignalHistory::add(const Message& message, const Known& sent) {
  (message.add ? adds_ : sets_) = true;
  all_ = join(all_, sent);
  if (!whole_) return;
  steps_.push_back(
      {message.rank, message.warp, message.lane, message.epoch, static_cast<int64_t>(message.value), sent});
  if (steps_.size() <= kMaxSteps) return;
  whole_ = false;
  steps_.clear();
}

size_t SignalHistory::reached(const Seen& seen, const Known& before) const {
  if (!sets_ || adds_ || !whole_) return 0;
  size_t at = 0; // the last step that was known
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.rank != steps_[0].rank) return 0;
    if (steps_known(before, step.rank, step.warp, step.lane) >= step.epoch ||
        rank_known(before, step.rank) >= step.epoch)
      at = i;
  }
  for (; at < steps_.size(); ++at)
    if (seen.exactly ? steps_[at].value == seen.value : steps_[at].value >= seen.value) return at + 1;
  return 0;
}

Known SignalHistory::guaranteed(const Seen& seen, int64_t now, const Known& before) const {
  if (seen.any || !whole_ || (adds_ && sets_) || steps_.empty()) return all_;
  Known known = nothing_known();
  if (sets_) {
    const size_t count = reached(seen, before);
    for (size_t i = 0; i < count; ++i) known = join(known, steps_[i].known);
    return count ? known : all_;
  }
  std::map<int, int64_t> sums;
  int64_t total = 0;
  for (const Step& step : steps_) sums[step.rank] += step.value, total += step.value;
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

bool SignalHistory::passes(int64_t value, size_t at, int64_t now, int rank, uint32_t warp, unsigned lane,
                           uint32_t epoch) const {
  if (!whole_ || adds_ == sets_) return false;
  const auto told = [&](const Step& step) {
    return steps_known(step.known, rank, warp, lane) >= epoch || rank_known(step.known, rank) >= epoch;
  };
  if (sets_) {
    while (at && at < steps_.size() && steps_[at].value == value) ++at;
    return at && at < steps_.size() && !told(steps_[at]);
  }
  int64_t word = now;
  for (const Step& step : steps_) {
    if (step.value < 0) return false; // it may come to the value twice
    word -= step.value;               // what it was at first
  }
  for (const Step& step : steps_) {
    if (word >= value && step.value && !told(step)) return true;
    word += step.value;
  }
  return false;
}

bool SignalHistory::forget(const RaceMemory& memory) {
  const std::vector<uint32_t>& ended = memory.ended;
  all_ = memory.beyond_ended(all_);
  // The host may have given the word another value since.
  const auto old = [&](const Step& step) { return step.epoch <= ended[static_cast<size_t>(step.rank)]; };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), old), steps_.end());
  return !all_->empty();
}

} // namespace sim
} // namespace tsn
