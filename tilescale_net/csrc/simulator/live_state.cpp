#include "live_state.h"

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/trace_ring.h"
#include "tilescale_net/device/context.h"

namespace tsn::sim {

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

// Current values of the words; their heaps stay mapped while the lock is held and the kernel runs.
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
    out.push_back({key.first, key.second, s.count, s.value, s.at_ns, s.lines ? entry_at(*s.lines, s.line) : ""});
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

namespace {

struct Tracer {
  Tracer(const std::string& path, uint64_t base) : ring(path), heap_base(base) {}
  TraceRing ring;
  uint64_t heap_base;
  uint32_t kernel = 0;
  uint64_t kernel_begin = 0;
  std::vector<uint32_t> lines;                                       // numbers of the launch's lines
  std::vector<uint32_t> names;                                       // and of the names there
  std::unordered_map<const Thread*, std::vector<TraceEvent>> open;   // calls that run
  std::unordered_map<const Thread*, std::vector<TraceEvent>> ranges; // that have begun
};

// Guards the pointer: a launch holds it from its beginning to its end.
std::mutex the_mutex;
std::unique_ptr<Tracer> the_tracer;

// A launch table's entry for a thread's current line.
uint32_t here(const Thread& t, const std::vector<uint32_t>& table) {
  return t.site >= 0 && static_cast<size_t>(t.site) < table.size() ? table[t.site] : 0;
}

TraceEvent event_here(TraceKind kind) {
  const Thread& t = running_thread();
  TraceEvent e;
  e.begin_ns = now_ns();
  e.kind = kind;
  e.block = t.linear_block;
  e.thread = t.linear;
  e.line = here(t, the_tracer->lines);
  return e;
}

void close(TraceEvent& e) {
  e.end_ns = now_ns();
  if (e.operation == kOpWait && e.word != kNoWord)
    e.value = __atomic_load_n(reinterpret_cast<const uint64_t*>(the_tracer->heap_base + e.word), __ATOMIC_RELAXED);
  the_tracer->ring.add(e);
}

} // namespace

void trace_start(const std::string& path, uint64_t heap_base) {
  auto made = std::make_unique<Tracer>(path, heap_base);
  std::lock_guard<std::mutex> lock(the_mutex);
  the_tracer = std::move(made);
}

void trace_stop() {
  std::lock_guard<std::mutex> lock(the_mutex);
  the_tracer.reset();
}

void trace_kernel_begins(const Launch& launch) {
  the_mutex.lock();
  trace_calls = the_tracer != nullptr;
  if (!the_tracer) return the_mutex.unlock();
  the_tracer->kernel = the_tracer->ring.name(launch.kernel);
  the_tracer->lines.clear();
  the_tracer->names.clear();
  for (const std::string& line : launch.lines) the_tracer->lines.push_back(the_tracer->ring.name(line));
  for (const std::string& name : launch.names) the_tracer->names.push_back(the_tracer->ring.name(name));
  the_tracer->kernel_begin = now_ns();
}

void trace_kernel_ends() {
  if (!trace_calls) return;
  trace_calls = false;
  TraceEvent e;
  e.begin_ns = the_tracer->kernel_begin;
  e.end_ns = now_ns();
  e.kind = TraceKind::kernel;
  e.name = the_tracer->kernel;
  the_tracer->ring.add(e);
  the_tracer->open.clear(); // of threads that were left for good
  the_tracer->ranges.clear();
  the_mutex.unlock();
}

void trace_call_begins(const Call& call) {
  if (!trace_calls) return;
  TraceEvent e = event_here(TraceKind::call);
  e.operation = static_cast<uint16_t>(call.operation);
  e.name = here(running_thread(), the_tracer->names);
  if (!e.name) e.name = the_tracer->ring.name(primitive_name(call.operation, call.scope));
  e.pe = call.pe;
  // Of waits and tests: the comparison.
  if (call.operation != kOpWait && call.operation != kOpTest) e.bytes = static_cast<uint64_t>(call.bytes * call.rows);
  e.value = call.value;
  if (call.signal) e.word = reinterpret_cast<uint64_t>(call.signal) - the_tracer->heap_base;
  the_tracer->open[&running_thread()].push_back(e);
}

void trace_call_ends() {
  const auto found = the_tracer->open.find(&running_thread());
  if (found == the_tracer->open.end()) return;
  auto& calls = found->second;
  for (; !calls.empty(); calls.pop_back()) close(calls.back());
}

void trace_range_begins() {
  if (!trace_calls) return;
  TraceEvent e = event_here(TraceKind::kernel_range);
  e.name = here(running_thread(), the_tracer->names);
  the_tracer->ranges[&running_thread()].push_back(e);
}

void trace_range_ends() {
  if (!trace_calls) return;
  auto& begun = the_tracer->ranges[&running_thread()];
  if (begun.empty()) return; // it began before the trace
  close(begun.back());
  begun.pop_back();
}

void trace_wait_ends(const WaitSubject& subject, uint64_t since_ns) {
  if (!trace_calls) return;
  TraceEvent e = event_here(TraceKind::wait);
  e.end_ns = e.begin_ns;
  e.begin_ns = since_ns;
  e.operation = static_cast<uint16_t>(subject.operation);
  e.pe = subject.pe;
  if (subject.word) {
    e.word = reinterpret_cast<uint64_t>(subject.word) - the_tracer->heap_base;
    e.value = __atomic_load_n(subject.word, __ATOMIC_RELAXED);
  }
  the_tracer->ring.add(e);
}

} // namespace tsn::sim
