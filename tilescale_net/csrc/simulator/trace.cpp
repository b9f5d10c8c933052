#include "trace.h"

#include "live_state.h"
#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/trace_ring.h"
#include "tilescale_net/device/context.h"

#include <memory>
#include <mutex>

namespace tsn {
namespace sim {

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

// What a table of the launch has for the line where a thread is.
uint32_t here(const Thread& t, const std::vector<uint32_t>& table) {
  return t.site >= 0 && static_cast<size_t>(t.site) < table.size() ? table[static_cast<size_t>(t.site)] : 0;
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
  // Of waits and tests it is the comparison.
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

} // namespace sim
} // namespace tsn
