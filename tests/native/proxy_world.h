// A job of several PEs inside one process for tests of the proxy: heaps, contexts, proxies, and "kernels" that are
// threads calling the device functions.
#pragma once

#define TSN_HOST_STANDALONE
#include "tests/native/check.h"
#include "tests/native/loopback.h"
#include "tilescale_net/csrc/proxy/proxy.h"
#include "tilescale_net/csrc/testing/chaos.h"
#include "tilescale_net/device/add_mailbox.h"
#include "tilescale_net/device/address.h"
#include "tilescale_net/device/drain_add_mailbox.h"
#include "tilescale_net/device/proxy_ops.h"

#include <fstream>
#include <functional>
#include <random>
#include <sys/mman.h>
#include <thread>

namespace tsn::proxy {

struct WorldOptions {
  int pes = 2;
  uint64_t heap_bytes = 8 << 20;
  double device_timeout = 60;
  bool cuda = false; // the heap counts as GPU memory; TSN_LIBCUDA must name a driver that takes host memory for it
  ProxyOptions proxy;
  int rank = -1; // this process holds only this PE, and meets the others through files in `folder`
  std::string folder;
  // One transport; see transports_of() for the one without.
  TransportFactory make;
};

// What the PEs of a world talk through.
inline TransportFactory transports_of(const WorldOptions& o) {
  if (o.make) return o.make;
  return [hub = std::make_shared<LoopbackHub>()](const TransportOptions& t) -> std::unique_ptr<Transport> {
    auto inner = std::make_unique<Loopback>(hub, t);
    if (t.chaos.empty()) return inner;
    return testing::make_chaos(std::move(inner), testing::parse_chaos(t.chaos), t.rank);
  };
}

class Pe {
public:
  int rank;
  char* heap;
  Context* context;
  uint32_t abort_word = 0;
  ErrorRecord error = {};
  std::unique_ptr<Proxy> proxy;
  std::vector<QueueView> views;

  template <class T = char>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(heap + offset);
  }

  Pe(int rank_, const WorldOptions& o) : rank(rank_), bytes_(o.heap_bytes) {
    heap = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    storage_.resize(sizeof(Context) + (size_t)o.pes * 8);
    context = reinterpret_cast<Context*>(storage_.data());
    ProxyOptions p = o.proxy;
    p.rank = p.transport.rank = rank;
    p.n_pes = o.pes;
    p.heap = {heap, bytes_, o.cuda ? Memory::cuda : Memory::host, 0};
    p.abort_word = reinterpret_cast<uint64_t>(&abort_word);
    for (int pe = 0; pe < o.pes; pe++)
      if (pe != rank) p.peers.push_back(pe);
    proxy = std::make_unique<Proxy>(p, o.make);
    views = proxy->views();
    *context = {};
    context->my_pe = rank;
    context->n_pes = o.pes;
    context->n_queues = (uint32_t)p.queues;
    context->queue_share = queue_share_of(context->n_queues);
    context->flags = adds_are_deferred(proxy->options()) ? (uint32_t)p.threads << kAddMailboxShift : 0;
    context->heap_base = reinterpret_cast<uint64_t>(heap);
    context->heap_bytes = bytes_;
    context->abort_word = reinterpret_cast<uint64_t>(&abort_word);
    context->error = reinterpret_cast<uint64_t>(&error);
    context->timeout_ns = (uint64_t)(o.device_timeout * 1e9);
    context->queues = reinterpret_cast<uint64_t>(views.data());
  }
  ~Pe() {
    proxy.reset();
    munmap(heap, bytes_);
  }

  // What wait.h does, with the message of a test.
  void wait(uint64_t offset, uint64_t value) {
    uint64_t seen = 0;
    const bool ok = spin(
        context,
        [&] {
          drain_add_mailboxes(context, n_add_mailboxes(context));
          seen = __atomic_load_n(at<uint64_t>(offset), __ATOMIC_ACQUIRE);
          return seen >= value;
        },
        [&] { fail(context, kWaitTimeout, kOpWait, -1, nullptr, value, seen, 0); });
    if (ok) return;
    Failure f;
    const bool failed = proxy->failure(&f);
    CHECK(ok, "PE %d: the word at %d never reached %d, it is %d; %s", rank, (int)offset, (int)value, (int)seen,
          failed ? f.text.c_str() : "the proxy is well");
  }
  void quiet(int pe) {
    const uint64_t ticket = queue_flush(context, pe);
    Failure f;
    if (!queue_wait(context, ticket, kOpQuiet, pe))
      CHECK(false, "PE %d: quiet did not end; %s", rank, proxy->failure(&f) ? f.text.c_str() : "the proxy is well");
  }

private:
  uint64_t bytes_;
  std::vector<char> storage_;
};

class World {
public:
  std::vector<std::unique_ptr<Pe>> pes; // PEs of this process

  explicit World(WorldOptions o) : options_(o) {
    o.make = transports_of(o);
    for (int i = 0; i < o.pes; i++)
      if (o.rank < 0 || i == o.rank) pes.push_back(std::make_unique<Pe>(i, o));
    std::vector<std::string> addresses((size_t)o.pes);
    for (auto& pe : pes) addresses[(size_t)pe->rank] = pe->proxy->address();
    exchange(&addresses);
    for (auto& pe : pes) pe->proxy->connect(addresses);
    for (auto& pe : pes) pe->proxy->start();
  }
  ~World() { barrier(); }

  // The PE if it is in this process.
  Pe* local(int rank) {
    for (auto& pe : pes)
      if (pe->rank == rank) return pe.get();
    return nullptr;
  }

  // Runs `kernel` on `blocks` threads of every PE and waits for all of them, in all processes.
  void run(const std::function<void(Pe&, int block)>& kernel, int blocks = 1) {
    std::vector<std::thread> threads;
    for (auto& pe : pes)
      for (int b = 0; b < blocks; b++) threads.emplace_back([&, b, p = pe.get()] { kernel(*p, b); });
    for (auto& t : threads) t.join();
    barrier();
  }
  void barrier() {
    if (!orderly_) return;
    std::vector<std::string> nothing((size_t)options_.pes, "-");
    exchange(&nothing);
  }

  void check_healthy() {
    for (auto& pe : pes) {
      Failure f;
      CHECK(!pe->proxy->failure(&f), "%s", f.text.c_str());
      CHECK(pe->error.kind == kNoError, "PE %d: device error %d", pe->rank, (int)pe->error.kind);
    }
  }
  void stop() {
    for (auto& pe : pes) pe->proxy->stop();
  }
  void disorderly() { orderly_ = false; } // the others need not be waited for

private:
  // Fills in the other processes' arguments of the same call.
  void exchange(std::vector<std::string>* each) {
    static int calls = 0; // of all worlds of the process, which come in one order everywhere
    const int call = calls++;
    if (options_.rank < 0) return;
    auto path = [&](int rank) { return options_.folder + "/" + std::to_string(call) + "." + std::to_string(rank); };
    std::ofstream(path(options_.rank) + ".part", std::ios::binary) << (*each)[(size_t)options_.rank];
    std::rename((path(options_.rank) + ".part").c_str(), path(options_.rank).c_str());
    const uint64_t end = now_ns() + 60000000000ull;
    for (int i = 0; i < options_.pes; i++) {
      std::ifstream in;
      while (in.open(path(i), std::ios::binary), !in) {
        CHECK(now_ns() < end, "rank %d did not come to exchange %d", i, call);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      (*each)[(size_t)i] = std::string(std::istreambuf_iterator<char>(in), {});
    }
  }

  WorldOptions options_;
  bool orderly_ = true;
};

} // namespace tsn::proxy
