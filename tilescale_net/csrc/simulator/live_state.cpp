#include "live_state.h"

#include "trace.h"

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/device/context.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace tsn {
namespace sim {

namespace {

constexpr size_t kMostWords = 1 << 16; // whose senders are remembered

struct Sent {
  uint64_t count, value, at_ns;
  std::shared_ptr<const std::vector<std::string>> lines; // of the launch
  int line;
};

struct Live {
  std::mutex mutex;
  LiveState now, given_up;
  bool gave_up = false;
  std::shared_ptr<const std::vector<std::string>> lines;
  std::map<std::pair<int, uint64_t>, Sent> sent; // by PE and word
};
// Never destroyed: reports may come from a thread that outlives main().
Live& live() {
  static Live* const the_live = new Live;
  return *the_live;
}

void wait_begins(const WaitSubject& subject) {
  if (scheduler) return scheduler->wait_begins(subject);
  const Thread& t = running_thread();
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.now.waits.push_back({&t, t.linear_block, t.linear, t.site, subject, 0, now_ns()});
}

void wait_ends() {
  if (scheduler) return scheduler->wait_ends();
  const Thread* t = &running_thread();
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  auto& waits = l.now.waits;
  const auto found = std::find_if(waits.begin(), waits.end(), [t](const LiveWait& w) { return w.thread == t; });
  if (found == waits.end()) return;
  trace_wait_ends(found->subject, found->since_ns);
  *found = waits.back();
  waits.pop_back();
}

// What the words hold now; they lie in heaps that stay mapped while the lock is held and the kernel runs.
void read_words(LiveState& state) {
  for (LiveWait& w : state.waits)
    if (w.subject.word) w.has = __atomic_load_n(w.subject.word, __ATOMIC_RELAXED);
}

void gives_up() {
  if (scheduler) return scheduler->gives_up();
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.gave_up) return;
  l.gave_up = true;
  l.given_up = l.now;
  l.given_up.deadlock = current_grid->deadlock();
  read_words(l.given_up);
}

} // namespace

bool trace_calls = false;

const TraceApi kTraceApi = {wait_begins,     wait_ends,          gives_up,        &trace_calls,
                            trace_call_ends, trace_range_begins, trace_range_ends};

void live_begin(const Launch& launch) {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.gave_up = false;
  if (!l.lines || *l.lines != launch.lines) l.lines = std::make_shared<const std::vector<std::string>>(launch.lines);
  l.now.kernel = launch.kernel;
  l.now.began_ns = now_ns();
  l.now.lines = launch.lines;
  l.now.waits.clear();
  trace_kernel_begins(launch);
}

void live_end() {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.now = LiveState();
  trace_kernel_ends();
}

void live_call(const Call& call) {
  trace_call_begins(call);
  if (!call.signal || (call.operation != kOpSignal && call.operation != kOpPutSignal)) return;
  const int line = running_thread().site;
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  const std::pair<int, uint64_t> key(call.pe, reinterpret_cast<uint64_t>(call.signal));
  const auto found = l.sent.find(key);
  if (found == l.sent.end() && l.sent.size() >= kMostWords) return;
  Sent& s = found == l.sent.end() ? l.sent[key] : found->second;
  s.count++;
  s.value = call.value;
  s.at_ns = now_ns();
  s.lines = l.lines;
  s.line = line;
}

LiveState live_state() {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.gave_up) return l.given_up;
  LiveState state = l.now;
  read_words(state);
  return state;
}

bool waits_for_words(size_t threads, LiveWait* one) {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.now.waits.size() != threads) return false;
  for (const LiveWait& w : l.now.waits)
    if (!w.subject.word) return false;
  const auto earlier = [](const LiveWait& a, const LiveWait& b) { return a.since_ns < b.since_ns; };
  *one = *std::max_element(l.now.waits.begin(), l.now.waits.end(), earlier);
  return true;
}

std::vector<SentSignal> sent_signals(size_t most) {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  std::vector<SentSignal> out;
  for (const auto& [key, s] : l.sent) {
    const bool known = s.lines && s.line >= 0 && static_cast<size_t>(s.line) < s.lines->size();
    out.push_back({key.first, key.second, s.count, s.value, s.at_ns,
                   known ? (*s.lines)[static_cast<size_t>(s.line)] : std::string()});
  }
  std::sort(out.begin(), out.end(), [](const SentSignal& a, const SentSignal& b) { return a.at_ns < b.at_ns; });
  if (out.size() > most) out.erase(out.begin(), out.end() - static_cast<ptrdiff_t>(most));
  return out;
}

void forget_sent_signals() {
  Live& l = live();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.sent.clear();
  l.gave_up = false;
}

} // namespace sim
} // namespace tsn
