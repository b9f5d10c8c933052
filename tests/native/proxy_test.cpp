// The proxy between PEs of one process.
//
// usage: proxy_test traffic [key=value ...]   every kind of operation, verified; fails on any difference
//        proxy_test refusals [key=value ...]  bad descriptors: named, and never sent
//        proxy_test garbage [key=value ...]   a peer that sends nonsense
//        proxy_test failure [key=value ...]   the network fails as set by chaos=; prints each PE's error
//        proxy_test reasons                   an aborted PE sends its peers the reason
//        proxy_test lies [key=value ...]      a peer whose messages and slots are well formed but for one field
//        proxy_test credit [key=value ...]    a peer that does not poll gets only as much as its queue can hold
//        proxy_test adds [key=value ...]      adds left to kernels do not outlive apply_adds()
//        proxy_test endings [key=value ...]   rounds=, first=: failed=1: PEs give up with large puts in flight, else
//        finalize
// keys: see configure(); seeds=a:b runs the traffic once per seed with ",seed=N" added to chaos.
#include "tests/native/proxy_endings.h"
#include "tests/native/proxy_lies.h"
#include "tests/native/proxy_traffic.h"

#include <map>

using namespace tsn;
using namespace tsn::proxy;

namespace {

std::map<std::string, std::string> arguments;

std::string text(const char* key, const char* fallback) {
  const auto it = arguments.find(key);
  return it == arguments.end() ? fallback : it->second;
}
int64_t number(const char* key, int64_t fallback) { return std::stoll(text(key, std::to_string(fallback).c_str())); }

WorldOptions configure() {
  WorldOptions o;
  o.pes = (int)number("pes", 2);
  o.cuda = number("cuda", 0) != 0;
  o.device_timeout = (double)number("device_timeout", 60);
  o.rank = (int)number("rank", -1);
  o.folder = text("folder", "");
  ProxyOptions& p = o.proxy;
  p.queues = (int)number("queues", 1);
  p.threads = (int)number("threads", 1);
  p.peer_threads = (int)number("peer_threads", 1);
  p.shared_bytes = (uint64_t)number("shared", 1 << 16);
  p.capacity = (uint32_t)number("capacity", 256);
  p.chunk_bytes = (uint64_t)number("chunk", 4096);
  p.inline_bytes = (uint32_t)number("inline", 128);
  p.force_staging = number("staging", 0) != 0;
  p.defers_adds = number("defers_adds", 0) != 0;
  p.staging_bytes = (uint64_t)number("staging_bytes", 1 << 20);
  p.window.groups = (uint32_t)number("groups", 4096);
  p.window.marks = (uint32_t)number("marks", 1024);
  p.timeout = (double)number("timeout_ms", 20000) / 1000;
  p.first_position = std::stoull(text("first", "0"));
  p.trust_last_chunk = number("trust_last_chunk", 0) != 0;
  p.transport.rails = (int)number("rails", 1);
  p.transport.depth = (uint32_t)number("depth", 128);
  p.transport.delivery_complete = number("delivery_complete", 1) != 0;
  p.transport.device_memory = number("device_memory", 0) != 0;
  p.transport.chaos = text("chaos", "");
  p.transport.provider = text("provider", "");
  if (!p.transport.provider.empty()) {
    p.transport.library = text("library", "");
    p.transport.chaos = text("chaos", "off");
#ifdef TSN_WITH_LIBFABRIC
    o.make = make_transport;
#else
    CHECK(false, "provider=: this program was built without libfabric");
#endif
  }
  return o;
}

void traffic() {
  const std::string seeds = text("seeds", "1:2");
  const uint64_t first = std::stoull(seeds), last = std::stoull(seeds.substr(seeds.find(':') + 1));
  const std::string only = text("only", "");
  for (uint64_t seed = first; seed < last; seed++) {
    WorldOptions o = configure();
    Traffic t = {o.pes, (int)number("blocks", 2), seed};
    t.rounds = (int)number("rounds", 40);
    t.largest = (uint64_t)number("largest", 20000);
    o.heap_bytes = t.heap_bytes();
    std::string& chaos = o.proxy.transport.chaos;
    if (!chaos.empty() && chaos != "off") chaos += ",seed=" + std::to_string(seed);
    std::map<std::string, double> sums;
    for (auto [name, run] : {std::pair<const char*, void (*)(World&, const Traffic&)>{"put_signal", traffic_put_signal},
                             {"fence", traffic_fence},
                             {"get", traffic_get},
                             {"quiet", traffic_quiet},
                             {"add", traffic_add}}) {
      if (!only.empty() && only != name) continue;
      World w(o); // each with fresh signals
      run(w, t);
      w.stop();
      w.check_healthy();
      for (auto& pe : w.pes)
        for (const auto& [key, value] : pe->proxy->stats()) sums[key] += value;
    }
    if (number("print", 0))
      for (const auto& [key, value] : sums) std::printf("%s %.6g\n", key.c_str(), value);
  }
}

struct Bad {
  const char* what;
  std::function<void(const Context*, char* heap, uint64_t bytes)> push;
};

std::vector<Bad> bad_pushes() {
  return {
      {"destination", [](auto* c, char* h, uint64_t n) { queue_put(c, h + n - 8, h, 16, 1); }},
      {"source", [](auto* c, char* h, uint64_t n) { queue_put(c, h, h + n - 8, 16, 1); }},
      {"destination", [](auto* c, char* h, uint64_t) { queue_put(c, h - kSystemBytes - 8, h, 8, 1); }},
      {"destination", [](auto* c, char* h, uint64_t) { queue_put(c, h, h, (int64_t)kMaxDescriptorBytes, 1); }},
      {"destination",
       [](auto* c, char* h, uint64_t n) { queue_put_signal(c, h + n, h, 8, 1, (uint64_t*)h, 1, SignalOp::set); }},
      {"signal word",
       [](auto* c, char* h, uint64_t n) { queue_put_signal(c, h, h, 8, 1, (uint64_t*)(h + n), 1, SignalOp::add); }},
      {"signal word",
       [](auto* c, char* h, uint64_t n) { queue_signal(c, (uint64_t*)(h + n - 7), 1, 1, SignalOp::set); }},
      {"not aligned", [](auto* c, char* h, uint64_t) { queue_signal(c, (uint64_t*)(h + 12), 1, 1, SignalOp::set); }},
      {"not aligned", [](auto* c, char* h, uint64_t) { queue_put_value(c, h + 2, 1, 4, 1); }},
      {"destination", [](auto* c, char* h, uint64_t n) { queue_put_value(c, h + n, 1, 1, 1); }},
      {"destination", [](auto* c, char* h, uint64_t n) { queue_get(c, h + n - 1, h, 2, 1); }},
      {"source", [](auto* c, char* h, uint64_t n) { queue_get(c, h, h + n - 1, 2, 1); }},
      {"there are 2 PEs", [](auto* c, char* h, uint64_t) { queue_put(c, h, h, 8, 2); }},
      {"there are 2 PEs", [](auto* c, char* h, uint64_t) { queue_put(c, h, h, 8, -1); }},
      {"there are 2 PEs", [](auto* c, char*, uint64_t) { queue_flush(c, 77); }},
      {"not reached", [](auto* c, char* h, uint64_t) { queue_put(c, h, h, 8, 0); }},
      {"not reached", [](auto* c, char*, uint64_t) { queue_fence(c, 0); }},
      {"unknown",
       [](auto* c, char*, uint64_t) {
         Request r = {};
         r.command = (Command)29;
         r.pe = 1;
         detail::queue_push<true>(c, 0, kOpPut, r);
       }},
      {"unknown", [](auto* c, char*,
                     uint64_t) { detail::queue_push<true>(c, 0, kOpPut, Request{Command::none, 1, 0, 0, 0, 0, 0}); }},
      {"part of no ticket",
       [](auto* c, char*, uint64_t) {
         detail::queue_push<true>(c, 0, kOpPut, Request{Command::flush_part, kAllPes, 0, 0, 0, 0, ~0ull});
       }},
      {"package's own", [](auto* c, char* h, uint64_t) { queue_put(c, h - kSystemBytes + 1024, h, 16, 1); }},
      {"package's own", [](auto* c, char* h, uint64_t) { queue_put(c, h, h - 16, 16, 1); }},
      {"package's own", [](auto* c, char* h, uint64_t) { queue_put_value(c, h - 8, 1, 8, 1); }},
      {"package's own", [](auto* c, char* h, uint64_t) { queue_get(c, h - 8, h, 8, 1); }},
      {"package's own",
       [](auto* c, char* h, uint64_t) { queue_signal(c, (uint64_t*)(h - kSystemBytes + 1024), 1, 1, SignalOp::set); }},
      {"not aligned",
       [](auto* c, char* h, uint64_t) { queue_put_signal(c, h, h, 8, 1, (uint64_t*)(h + 4), 1, SignalOp::set); }},
  };
}

void refusals() {
  for (const Bad& bad : bad_pushes()) {
    WorldOptions o = configure();
    o.device_timeout = 5;
    World w(o);
    Pe &pe = *w.pes[0], &other = *w.pes[1];
    std::memset(pe.heap + kSystemBytes, 0x11, o.heap_bytes - kSystemBytes);
    bad.push(pe.context, pe.heap + kSystemBytes, o.heap_bytes - kSystemBytes);
    spin(pe.context, [] { return false; }, [] {}); // a wait that only the abort ends
    CHECK(__atomic_load_n(&pe.abort_word, __ATOMIC_ACQUIRE) == 1, "%s: abort word", bad.what);
    Failure f;
    CHECK(pe.proxy->failure(&f) && f.kind == "InvalidDescriptor", "%s: %s", bad.what, f.kind.c_str());
    CHECK(f.text.find(bad.what) != std::string::npos, "\"%s\" is not in: %s", bad.what, f.text.c_str());
    CHECK(f.text.find("rank 0") == 0 && f.text.find("PE " + std::to_string(f.pe)) != std::string::npos && f.pe >= 0,
          "%s", f.text.c_str());
    const uint64_t end = now_ns() + 5000000000ull;
    while (!other.proxy->failure(&f) && now_ns() < end) sched_yield();
    CHECK(f.kind == "PeerLost" && f.text.find("InvalidDescriptor") == std::string::npos, "%s", f.text.c_str());
    CHECK(f.text.find("PE 0 gave up") != std::string::npos && f.text.find("refused") != std::string::npos, "%s",
          f.text.c_str());
    for (uint64_t i = kSystemBytes; i < o.heap_bytes; i++)
      CHECK(other.heap[i] == 0, "%s: something was sent", bad.what);
    w.stop();
  }
}

// Traffic until the network gives up. Every PE must end with an error of its own, within the deadline.
void failure() {
  WorldOptions o = configure();
  o.device_timeout = 3 * o.proxy.timeout + 5;
  const uint64_t start = now_ns();
  World w(o);
  w.disorderly();
  w.run([&](Pe& pe, int) {
    const int to = (pe.rank + 1) % o.pes;
    while (!aborted(pe.context)) {
      for (int i = 0; i < 10; i++)
        queue_put_signal(pe.context, pe.at(kSystemBytes), pe.at(1 << 20), 10000, to, pe.at<uint64_t>(1 << 21), 1,
                         SignalOp::add);
      queue_wait(pe.context, queue_flush(pe.context, -1), kOpQuiet);
    }
  });
  for (auto& pe : w.pes) {
    Failure f;
    CHECK(pe->proxy->failure(&f), "PE %d ended without an error (device error %d)", pe->rank, (int)pe->error.kind);
    std::printf("%s: %s\n", f.kind.c_str(), f.text.c_str());
    CHECK(f.text.find("rank " + std::to_string(pe->rank)) == 0);
  }
  w.stop();
  const double seconds = (double)(now_ns() - start) * 1e-9;
  CHECK(seconds < 3 * o.proxy.timeout + 5, "it took %f s", seconds);
}

// A peer that sends nonsense: random records and immediates end the job with an error that names it, nothing worse.
void garbage() {
  const int seeds = (int)number("seeds", 300);
  int refused = 0;
  for (int seed = 1; seed <= seeds; seed++) {
    std::mt19937_64 random((uint64_t)seed);
    WorldOptions o = configure();
    o.heap_bytes = 1 << 20;
    Liar liar(o);
    Failure f;
    for (int i = 0; i < 200 && !liar.exposed(&f); i++) {
      if (random() % 4 == 0) {
        const uint32_t imm = random() % 2 ? (uint32_t)random() : 1u << 31 | (uint32_t)(random() % 16);
        liar.write_with(liar.staged ? 0 : kSystemBytes, "nothing", 8, imm);
        continue;
      }
      std::string message(random() % 200, 0);
      for (char& c : message) c = (char)random();
      // Mostly a type that exists and small numbers, to get past the first check.
      if (!message.empty() && random() % 8) message[0] = (char)(random() % 8);
      if (message.size() > 48 && random() % 2)
        for (size_t at = 1; at < message.size(); at++) message[at] = at % 4 ? 0 : (char)(random() % 8);
      liar.send_bytes(message);
    }
    liar.verdict(200000000);
    if (liar.victim().proxy->failure(&f)) {
      refused++;
      CHECK(f.text.find("PE ") != std::string::npos && f.pe >= 0, "%s", f.text.c_str());
    }
    liar.stop();
  }
  CHECK(refused > seeds * 9 / 10, "only %d of %d ended in an error", refused, seeds);
}

void endings() {
  const bool failed = number("failed", 0) != 0;
  const int first = (int)number("first", 0);
  for (int round = first; round < first + (int)number("rounds", 5); round++) {
    WorldOptions o = configure();
    o.proxy.chunk_bytes = (uint64_t)number("chunk", 1 << 20);
    (failed ? end_by_failure : end_in_order)(o, round);
  }
  for (int round = 0; !failed && round < (int)number("drains", 0); round++) drain_while_busy(configure(), round);
}

} // namespace

int main(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  for (int i = 2; i < argc; i++) {
    const std::string a = argv[i];
    CHECK(a.find('=') != std::string::npos, "key=value expected, not %s", argv[i]);
    arguments[a.substr(0, a.find('='))] = a.substr(a.find('=') + 1);
  }
  if (scenario == "traffic") traffic();
  else if (scenario == "refusals") refusals();
  else if (scenario == "failure") failure();
  else if (scenario == "garbage") garbage();
  else if (scenario == "endings") endings();
  else if (scenario == "reasons") reasons(configure());
  else if (scenario == "lies") lies(configure());
  else if (scenario == "credit") credit(configure(), number("most", 4096));
  else if (scenario == "adds") adds(configure());
  else CHECK(false, "unknown scenario '%s'", scenario.c_str());
  std::puts("ok");
  return 0;
}
