#include "happens_before.h"

#include "tilescale_net/device/operation_names.h"

#include <algorithm>
#include <sys/mman.h>

namespace tsn {
namespace sim {

namespace {

constexpr size_t kMaxRecords = 4096;  // of one kind; what comes after them is not looked at
constexpr size_t kMaxPast = 1024;     // epochs of a warp whose knowledge is kept; older ones count as ordered
constexpr int64_t kMaxScan = 1 << 26; // bytes of sources that are looked at once more when a launch ends
uint32_t next_epoch = 1; // of this process: stamps of earlier launches are older than all of a launch's own
Shadow shadow{};

} // namespace

Shadow shadow_of_heap() { return shadow; }

void drop_shadow() {
  if (shadow.stamps) munmap(shadow.stamps, shadow.bytes * 2);
  shadow = {};
}

void set_shadow(uint64_t base, uint64_t bytes) {
  if (shadow.base == base && shadow.bytes == bytes) return;
  drop_shadow();
  // Only what is stored to takes memory.
  void* p = mmap(nullptr, bytes * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) shadow = {static_cast<uint64_t*>(p), base, bytes};
}

std::string primitive_name(uint32_t operation, uint32_t scope) {
  std::string name = std::string("N.") + kOperationNames[operation];
  if (operation == kOpFlush) return name + "_async";
  if (operation == kOpBarrier) return name + "_all";
  if (operation == kOpWait) return name + (scope == 0 ? "" : scope == 1 ? "_warp" : "_block");
  if (operation != kOpPut && operation != kOpGet && operation != kOpPutSignal) return name;
  return name + (scope == 0 ? "_thread" : scope == 1 ? "_warp" : "_block");
}

HappensBefore::HappensBefore(unsigned warps_per_block, const std::vector<std::string>& lines)
    : warps_per_block_(warps_per_block), lines_(lines), first_epoch_(next_epoch++),
      signalled_(std::make_shared<Clock>()) {}

HappensBefore::~HappensBefore() {
  for (const auto& entry : warps_) next_epoch = std::max(next_epoch, entry.second.epoch + 1);
}

HappensBefore::State& HappensBefore::at(uint32_t warp) {
  State& state = warps_[warp];
  if (!state.known) {
    static const Known nothing = std::make_shared<Clock>();
    state.known = nothing;
    state.epoch = first_epoch_;
  }
  return state;
}

void HappensBefore::turn(State& state, Known known) {
  if (state.past.size() == 2 * kMaxPast) state.past.erase(state.past.begin(), state.past.begin() + kMaxPast);
  state.past.emplace_back(state.epoch++, std::move(state.known));
  state.known = std::move(known);
}

uint32_t HappensBefore::epoch_of(const Clock* clock, uint32_t warp) {
  const auto it = std::lower_bound(clock->begin(), clock->end(), std::make_pair(warp, 0u));
  return it != clock->end() && it->first == warp ? it->second : 0;
}

Known HappensBefore::join(const Known& a, const Known& b) {
  if (a == b || b->empty()) return a;
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

// Whether `a` holds all that `b` holds.
bool HappensBefore::covers(const Known& a, const Known& b) {
  if (a == b || b->empty()) return true;
  auto i = a->begin();
  for (const auto& entry : *b) {
    while (i != a->end() && i->first < entry.first) ++i;
    if (i == a->end() || i->first != entry.first || i->second < entry.second) return false;
  }
  return true;
}

Known HappensBefore::with_own(uint32_t warp, const State& state) const {
  return join(state.known, std::make_shared<Clock>(Clock{{warp, state.epoch}}));
}

void HappensBefore::meet(const std::vector<uint32_t>& warps) {
  Clock own;
  Known all = std::make_shared<Clock>();
  for (uint32_t warp : warps) {
    State& state = at(warp);
    own.emplace_back(warp, state.epoch);
    all = join(all, state.known);
  }
  std::sort(own.begin(), own.end());
  all = join(std::make_shared<Clock>(std::move(own)), all);
  for (uint32_t warp : warps) turn(at(warp), all);
}

void HappensBefore::word(uint32_t warp, const void* address, WordAccess access) {
  State& state = at(warp);
  Known& there = words_.try_emplace(address, std::make_shared<Clock>()).first->second;
  // Polls that learn nothing leave no trace, however many there are.
  if (access == WordAccess::acquire && covers(state.known, there)) return;
  Known known = state.known;
  if (access != WordAccess::release) known = join(known, there);
  if (access != WordAccess::acquire) there = join(there, with_own(warp, state));
  turn(state, std::move(known));
}

void HappensBefore::waited(uint32_t warp) {
  State& state = at(warp);
  if (!covers(state.known, signalled_)) turn(state, join(state.known, signalled_));
}

bool HappensBefore::comes_before(const Event& event, uint32_t warp) {
  return event.warp == warp || epoch_of(at(warp).known.get(), event.warp) >= event.epoch;
}

void HappensBefore::add_put(const Event& event) {
  std::vector<Put>& list = puts_[{event.warp, event.pe}];
  if (!list.empty() && list.back().event.epoch == event.epoch && list.back().event.line == event.line) return;
  if (list.size() >= kMaxRecords) return;
  Put put{event};
  for (const auto& entry : fences_) {
    const Event& fence = entry.second;
    if ((fence.pe == event.pe || fence.pe == -1) && !comes_before(fence, event.warp))
      put.beside = true, put.fence = fence;
  }
  list.push_back(put);
}

void HappensBefore::cover(const Event& fence) {
  for (auto& entry : puts_) {
    if (fence.pe != -1 && fence.pe != entry.first.second) continue;
    std::vector<Put>& list = entry.second;
    list.erase(std::remove_if(list.begin(), list.end(), [&](Put& p) { return comes_before(p.event, fence.warp); }),
               list.end());
    for (Put& put : list) put.beside = true, put.fence = fence;
  }
  fences_[{fence.warp, fence.pe}] = fence;
}

// Whether `warp` knew of the event in that epoch of its own, or may have.
bool HappensBefore::knew(uint32_t warp, uint32_t epoch, const Event& event) const {
  const auto writer = warps_.find(warp);
  if (writer == warps_.end()) return true;
  const auto& past = writer->second.past;
  if (!past.empty() && epoch < past.front().first) return true; // forgotten
  const auto it =
      std::lower_bound(past.begin(), past.end(), epoch, [](const auto& entry, uint32_t e) { return entry.first < e; });
  const Known& known = it == past.end() ? writer->second.known : it->second;
  return epoch_of(known.get(), event.warp) >= event.epoch;
}

// Looks for stores to the source that the put does not come after; at the end of the launch, for those that do not come
// after the put either.
std::string HappensBefore::scan(const Source& source, bool at_end) const {
  const uint64_t offset = reinterpret_cast<uint64_t>(source.from) - shadow.base;
  if (!shadow.stamps || offset >= shadow.bytes || source.bytes < 4) return "";
  const uint64_t last = (offset + static_cast<uint64_t>(source.bytes)) / 4; // whole granules only
  uint64_t before = 0;
  for (uint64_t i = (offset + 3) / 4; i < last; ++i) {
    const uint64_t stamp = shadow.stamps[i];
    if (stamp == before) continue;
    before = stamp;
    const uint32_t warp = static_cast<uint32_t>(stamp >> 32), epoch = static_cast<uint32_t>(stamp);
    if (epoch < first_epoch_ || warp == source.event.warp) continue;
    if (epoch_of(source.known.get(), warp) >= epoch) continue;
    if (at_end && knew(warp, epoch, source.event)) continue;
    return name(source.event) + " sends what " + place(warp) + " writes (" + std::to_string(i * 4 - offset) +
           " bytes from where it begins), and nothing orders the two: T.sync_threads() or another synchronisation is "
           "missing between them";
  }
  return "";
}

std::string HappensBefore::sends(const Event& event, const Call& call) {
  if (call.bytes <= 0 || !call.source) return "";
  const Source source{event, static_cast<const char*>(call.source), call.bytes, at(event.warp).known};
  const std::string wrong = scan(source, false);
  if (sources_.size() < kMaxRecords) sources_.push_back(source);
  return wrong;
}

std::string HappensBefore::use(const Event& event, const Call& call) {
  const auto made = uses_.try_emplace({call.signal, call.pe}, Use{event, call.add});
  const Use& first = made.first->second;
  if (first.add == call.add) return "";
  return name(event) + (call.add ? " adds to" : " sets") + " the signal word at heap offset " +
         std::to_string(reinterpret_cast<uint64_t>(call.signal) - shadow.base) + " of PE " + std::to_string(call.pe) +
         ", which " + name(first.event) + (first.add ? " adds to" : " sets") +
         ": one word is either set or added to; use two words";
}

std::string HappensBefore::stored_plainly(const Event& event, const uint64_t* word) const {
  const uint64_t offset = reinterpret_cast<uint64_t>(word) - shadow.base;
  if (!shadow.stamps || offset >= shadow.bytes) return "";
  for (uint64_t i = offset / 4; i < offset / 4 + 2; ++i)
    if (static_cast<uint32_t>(shadow.stamps[i]) >= first_epoch_)
      return name(event) + " waits for the signal word at heap offset " + std::to_string(offset) + ", to which " +
             place(static_cast<uint32_t>(shadow.stamps[i] >> 32)) +
             " stores in the same kernel: signal words are changed by signals only; zero them on the host";
  return "";
}

std::string HappensBefore::begin(uint32_t warp, const Call& call, int line) {
  const Event event{warp, at(warp).epoch, call.pe, line, call.operation, call.scope};
  std::string wrong;
  switch (call.operation) {
  case kOpPut:
  case kOpPutValue:
    wrong = sends(event, call);
    add_put(event);
    break;
  case kOpPutSignal:
    wrong = sends(event, call);
    [[fallthrough]];
  case kOpSignal:
    if (wrong.empty()) wrong = use(event, call);
    [[fallthrough]];
  case kOpBarrier: {
    State& state = at(warp);
    signalled_ = join(signalled_, with_own(warp, state));
    turn(state, state.known);
    break;
  }
  case kOpFence:
  case kOpQuiet:
  case kOpFlush:
    cover(event);
    turn(at(warp), at(warp).known);
    break;
  case kOpWait:
  case kOpTest:
    wrong = stored_plainly(event, call.signal);
    waits_.try_emplace(call.signal, event);
    break;
  default:
    break;
  }
  return wrong;
}

std::string HappensBefore::end() const {
  for (const auto& entry : puts_)
    for (const Put& put : entry.second)
      if (put.beside)
        return name(put.event) + " to PE " + std::to_string(put.event.pe) +
               " comes before no fence or quiet: nothing orders it before " + name(put.fence) +
               "; T.sync_threads() or another synchronisation is missing between them";
  int64_t left = kMaxScan;
  for (const Source& source : sources_) {
    if ((left -= source.bytes) < 0) break;
    const std::string wrong = scan(source, true);
    if (!wrong.empty()) return wrong;
  }
  for (const auto& entry : waits_) {
    const std::string wrong = stored_plainly(entry.second, entry.first);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string HappensBefore::place(uint32_t warp) const {
  return "block " + std::to_string(warp / warps_per_block_) + " warp " + std::to_string(warp % warps_per_block_);
}

std::string HappensBefore::name(const Event& event) const {
  std::string out = primitive_name(event.operation, event.scope) + " of " + place(event.warp);
  if (event.line >= 0 && static_cast<size_t>(event.line) < lines_.size())
    out += " (" + lines_[static_cast<size_t>(event.line)] + ")";
  return out;
}

} // namespace sim
} // namespace tsn
