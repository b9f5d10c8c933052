// The part of HappensBefore that tracks which puts are complete: by fences and quiets, and for which ranks by signals.
#include "happens_before.h"

#include <algorithm>

namespace tsn {
namespace sim {

namespace {
constexpr size_t kMaxPuts = 4096; // puts of a warp to a PE; what comes after them is not looked at
} // namespace

HappensBefore::Put HappensBefore::made_put(const Event& event) {
  Put put{event};
  for (const auto& entry : fences_) {
    const Event& fence = entry.second;
    if ((fence.pe == event.pe || fence.pe == -1) && !comes_before(fence, event.warp, event.lane))
      put.beside = true, put.fence = fence;
  }
  return put;
}

void HappensBefore::add_put(const Put& put) {
  const Event& event = put.event;
  if (follows_ranks_ && event.lane < kEveryLane) note_thread_put(event);
  else if (follows_ranks_) put_epochs_[{event.warp, event.pe}] = event.epoch;
  std::vector<Put>& list = puts_[{event.warp, event.pe}];
  if (!list.empty() && list.back().event.epoch == event.epoch && list.back().event.line == event.line) return;
  if (list.size() < kMaxPuts) list.push_back(put);
  else more_puts_ = true;
}

void HappensBefore::cover(const Event& fence) {
  for (auto it = puts_.begin(); it != puts_.end();) {
    const auto entry = it++;
    if (fence.pe != -1 && fence.pe != entry->first.second) continue;
    std::vector<Put>& list = entry->second;
    list.erase(
        std::remove_if(list.begin(), list.end(), [&](Put& p) { return comes_before(p.event, fence.warp, fence.lane); }),
        list.end());
    for (Put& put : list) put.beside = true, put.fence = fence;
    if (list.empty()) puts_.erase(entry);
  }
  fences_[{fence.warp, fence.pe}] = fence;
}

uint32_t HappensBefore::stores_before(const Event& event, int pe) {
  uint32_t all = at(event.warp).epoch;
  for (unsigned other = 0; event.lane < kEveryLane && other < kEveryLane; ++other) {
    const auto it = lane_epochs_.find({event.warp * 32ull + other, pe});
    if (other == event.lane || it == lane_epochs_.end()) continue;
    const uint32_t known = known_steps(event.warp, event.lane, event.warp, other);
    if (known < it->second) all = std::min(all, known);
  }
  return all;
}

void HappensBefore::note_thread_put(const Event& event) {
  lane_epochs_[{event.warp * 32ull + event.lane, event.pe}] = event.epoch;
  thread_epochs_[{event.warp, event.pe}] = event.epoch;
}

Known HappensBefore::completed(const Event& event, Part part) {
  State& state = at(event.warp);
  const Known& known = known_to(state, event.lane);
  if (!follows_ranks_) return known;
  auto before = std::make_shared<Clock>(), more = std::make_shared<Clock>();
  const auto concerns = [&](int pe) { return event.pe == -1 || event.pe == pe; };
  const auto add = [&](Clock& to, const std::pair<uint32_t, int>& by, uint64_t lanes, uint32_t epoch) {
    to.emplace_back(clock_key(part, memory_->me, by.first, by.second, lanes), epoch);
  };
  // Those of earlier launches come before it.
  for (const auto& [by, epoch] : memory_->put_epochs)
    if (concerns(by.second)) add(*before, by, 0, epoch);
  for (const auto& [by, epoch] : memory_->thread_epochs)
    if (concerns(by.second)) add(*before, by, kAllLanes, epoch);
  // What whole warps put takes all of their lanes.
  for (const auto& [by, latest] : put_epochs_) {
    const uint32_t epoch = std::min(known_steps(event.warp, event.lane, by.first, kEveryLane), latest);
    if (concerns(by.second) && epoch >= first_epoch_) add(*more, by, 0, epoch);
  }
  for (const auto& [by, latest] : thread_epochs_) {
    if (!concerns(by.second)) continue;
    const bool own = by.first == event.warp;
    const uint32_t all = std::min(
        own ? stores_before(event, by.second) : known_steps(event.warp, event.lane, by.first, kEveryLane), latest);
    if (all >= first_epoch_) add(*more, by, kAllLanes, all);
    for (unsigned lane = 0; all < latest && lane < kEveryLane; ++lane) {
      const auto it = lane_epochs_.find({by.first * 32ull + lane, by.second});
      if (it == lane_epochs_.end()) continue;
      const bool self = own && lane == event.lane;
      const uint32_t one = self ? it->second : known_steps(event.warp, event.lane, by.first, lane);
      if (one > all) add(*more, by, lane + 1, std::min(one, it->second));
    }
  }
  std::sort(before->begin(), before->end());
  std::sort(more->begin(), more->end());
  return join(join(known, before), more);
}

// A signal to a PE carries the puts to it that are fenced.
const Known& HappensBefore::sent_by(State& state, unsigned lane, int pe) {
  Sent& sent = state.sent[pe];
  const Known& known = known_to(state, lane);
  if (sent.from == known) return sent.sent;
  sent = {known, join(known, std::make_shared<Clock>(fenced_puts(known, pe)))};
  return sent.sent;
}

Clock HappensBefore::fenced_puts(const Known& known, int pe) const {
  Clock done;
  for (const auto& [key, epoch] : *known)
    if (part_of(key) == Part::fenced && rank_of(key) == memory_->me && pe_of(key) == pe)
      done.emplace_back(clock_key(Part::done, memory_->me, warp_of(key), pe, word_of(key)), epoch);
  return done;
}

Message HappensBefore::message(uint32_t warp, unsigned lane, int pe, const uint64_t* signal, uint32_t put_epoch) {
  State& state = at(warp);
  const Known& sent = sent_by(state, lane, pe);
  Message out{};
  out.word = signal ? memory_->offset(signal) / 8 : kAnyWord;
  out.rank = memory_->me;
  out.warp = warp;
  out.epoch = state.epoch;
  out.lane = lane;
  out.floor = state.floor;
  out.pe = pe;
  out.carried = put_epoch;
  out.everything = sent->size() > kMaxCarried;
  if (!out.everything) {
    out.entries = static_cast<uint32_t>(sent->size());
    out.at = memory_->publish(sent);
  }
  signalled_ = without_lanes(join(signalled_, with_own(warp, state, lane)));
  turn(state, state.known);
  return out;
}

} // namespace sim
} // namespace tsn
