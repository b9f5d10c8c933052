// The device functions at thread scope as a plain program: PEs are objects of one process, their heaps are mapped.
#define TSN_HOST_STANDALONE
#include "../native/check.h"
#include "tilescale_net.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

using namespace tsn;

namespace {

constexpr int kUserWords = 2048;
constexpr size_t kHeap = kSystemBytes + kUserWords * 8;

// A job of n PEs. What is not mapped would go through a proxy, which does not exist here.
struct Job {
  struct Pe {
    std::vector<uint64_t> heap = std::vector<uint64_t>(kHeap / 8);
    std::vector<uint64_t> context;
    uint32_t abort_word = 0;
    ErrorRecord error = {};

    Context* ctx() { return reinterpret_cast<Context*>(context.data()); }
    // Word i of the user's part of the heap.
    uint64_t* word(int i) { return heap.data() + kSystemBytes / 8 + i; }
  };
  std::vector<std::unique_ptr<Pe>> pes;

  explicit Job(int n, uint64_t timeout_ns = 5000000000ull, int unmapped = -1) {
    const size_t bases = n > int(kInlineBases) ? n : kInlineBases;
    for (int i = 0; i < n; i++) pes.push_back(std::make_unique<Pe>());
    for (int i = 0; i < n; i++) {
      Pe& pe = *pes[i];
      pe.context.resize(offsetof(Context, peer_base) / 8 + bases);
      Context& c = *pe.ctx();
      c.version = kContextVersion;
      c.my_pe = c.node_pe = i;
      c.n_pes = c.n_node_pes = n;
      c.heap_base = reinterpret_cast<uint64_t>(pe.heap.data());
      c.heap_bytes = kHeap;
      c.abort_word = reinterpret_cast<uint64_t>(&pe.abort_word);
      c.error = reinterpret_cast<uint64_t>(&pe.error);
      c.timeout_ns = timeout_ns;
      for (int k = 0; k < n; k++) c.peer_base[k] = k == unmapped ? 0 : reinterpret_cast<uint64_t>(pes[k]->heap.data());
    }
  }
  Pe& operator[](int i) { return *pes[i]; }
};

constexpr Scope kThread = Scope::thread;
constexpr Engine kAuto = Engine::automatic;

void put_some(const Context* c, void* dst, const void* src, int64_t bytes, int pe) {
  put<kThread, kAuto, 4, 0, 0>(c, dst, src, bytes, pe, nullptr);
}
template <SignalOp Op>
void put_signal_some(const Context* c, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                     uint64_t value) {
  put_signal<kThread, kAuto, 4, 0, 0, Op>(c, dst, src, bytes, pe, sig, value, nullptr);
}
void get_some(const Context* c, void* dst, const void* src, int64_t bytes, int pe) {
  get<kThread, kAuto, 4, 0, 0>(c, dst, src, bytes, pe, nullptr);
}

void moves_data(int n, int pe) {
  Job job(n);
  Job::Pe &me = job[0], &peer = job[pe];
  const Context* c = me.ctx();
  for (int i = 0; i < 64; i++) *me.word(i) = 1000 + i, *peer.word(i) = 2000 + i;
  put_some(c, me.word(100), me.word(0), 64 * 8, pe);
  for (int i = 0; i < 64; i++) CHECK(*peer.word(100 + i) == 1000u + i);
  get_some(c, me.word(200), me.word(0), 64 * 8, pe);
  for (int i = 0; i < 64; i++) CHECK(*me.word(200 + i) == 2000u + i);
  put_signal_some<SignalOp::set>(c, me.word(300), me.word(1), 8, pe, me.word(310), 7);
  put_signal_some<SignalOp::add>(c, me.word(301), me.word(2), 8, pe, me.word(310), 5);
  put_signal_some<SignalOp::set>(c, me.word(302), me.word(3), 0, pe, me.word(311), 9);
  CHECK(*peer.word(300) == 1001 && *peer.word(301) == 1002 && *peer.word(302) == 0);
  CHECK(*peer.word(310) == 12 && *peer.word(311) == 9);
  signal<SignalOp::add>(c, me.word(311), 1, pe);
  CHECK(*peer.word(311) == 10);
  put_value(c, reinterpret_cast<float*>(me.word(320)), 2.5f, pe);
  put_value(c, reinterpret_cast<uint8_t*>(me.word(321)) + 3, 255, pe);
  CHECK(*reinterpret_cast<float*>(peer.word(320)) == 2.5f && *peer.word(321) == 0xff000000u);
  CHECK(remote(c, me.word(5), pe) == peer.word(5));
  *peer.word(330) = 10;
  CHECK(atomic<AtomicOp::add>(c, me.word(330), 5, pe) == 10 && *peer.word(330) == 15);
  CHECK(atomic_cas(c, me.word(330), 15, 3, pe) == 15 && atomic_cas(c, me.word(330), 15, 4, pe) == 3);
  CHECK(atomic<AtomicOp::min>(c, reinterpret_cast<int64_t*>(me.word(330)), -2, pe) == 3);
  CHECK(atomic<AtomicOp::exch>(c, me.word(330), 1, pe) == uint64_t(-2) && *peer.word(330) == 1);
  fence(c, pe), fence(c, -1), quiet(c, pe), quiet(c, -1);
  flush_wait(c, flush_async(c, pe)), flush_wait(c, flush_async(c, -1));
  CHECK(my_pe(c) == 0 && n_pes(c) == n && is_direct(c, pe) && !is_direct(c, n) && !is_direct(c, -1));
  CHECK(me.error.kind == kNoError && me.abort_word == 0);
}

// A thread's put_signal of any size and alignment: every byte, no other, and the signal.
void put_signals_of_all_sizes() {
  Job job(2);
  Job::Pe &me = job[0], &peer = job[1];
  char *from = reinterpret_cast<char*>(me.word(0)), *to = reinterpret_cast<char*>(me.word(256));
  for (int i = 0; i < 512; i++) from[i] = char(i * 37 + 11);
  uint64_t sent = 0;
  for (int src : {0, 1, 4, 8, 9})
    for (int dst : {0, 2, 4, 8, 13})
      for (int bytes = 0; bytes < 50; bytes++) {
        std::vector<uint64_t> expected = peer.heap;
        memcpy(reinterpret_cast<char*>(expected.data()) + kSystemBytes + 2048 + dst, from + src, size_t(bytes));
        expected[kSystemBytes / 8 + 500] = ++sent;
        put_signal_some<SignalOp::set>(me.ctx(), to + dst, from + src, bytes, 1, me.word(500), sent);
        CHECK(peer.heap == expected, "%d bytes from +%d to +%d", bytes, src, dst);
      }
}

// Pushes in bulk, which the simulator's kernels do not take, by a block whose warps come in any order: any alignment
// that both ends share, with a prologue and without, and no byte beside.
template <Engine E>
void pushes_in_bulk(uint32_t threads) {
  alignas(128) static char ring[3 * 256];
  constexpr int kDst = kUserWords / 2;
  Job job(2);
  Job::Pe &me = job[0], &peer = job[1];
  for (int i = 0; i < kUserWords; i++) *me.word(i) = 0x0101010101010101ull * uint64_t(i % 251);
  sim::Thread& self = sim::self();
  const sim::Thread before = self;
  self.block_dim = {threads, 1, 1};
  uint32_t ahead = 0;
  for (int offset : {0, 1, 8, 15, 16, 48, 112})
    for (int bytes = 16; bytes < 8000; bytes += bytes < 400 ? 37 : 411) {
      char *src = reinterpret_cast<char*>(me.word(0)) + offset, *dst = reinterpret_cast<char*>(me.word(kDst)) + offset;
      std::fill(peer.heap.begin(), peer.heap.end(), 0x7777777777777777ull);
      std::vector<uint64_t> expected = peer.heap;
      memcpy(reinterpret_cast<char*>(expected.data()) + kSystemBytes + kDst * 8 + offset, src, size_t(bytes));
      uint64_t* sig = bytes % 2 ? me.word(kUserWords - 1) : nullptr;
      uint64_t way = kNotPushed;
      for (uint32_t i = 0; i < threads; i++) {
        self.linear = (i + uint32_t(bytes)) % threads; // the leader first, last or in between
        self.lane = self.linear % 32;
        const uint64_t mine = push_bulk_by_block<E, 8, 3, 256>(me.ctx(), kOpPut, dst, src, bytes, 1, sig, ring);
        if (self.linear == 0) way = mine;
      }
      CHECK(reinterpret_cast<char*>(me.heap.data()) + way == reinterpret_cast<char*>(peer.heap.data()));
      CHECK(peer.heap == expected, "%d bytes at %d by %u threads", bytes, offset, threads);
      const uint32_t prologue = prologue_bytes<kPrologueRows<E, 8>>(dst, src, bytes);
      CHECK(prologue == 0 || (reinterpret_cast<uint64_t>(dst) + prologue) % 128 == 0); // the ring begins with a segment
      ahead += prologue != 0;
    }
  CHECK((ahead > 10) == (E == Engine::automatic && threads >= 64), "%u prologues of %u threads", ahead, threads);
  self = before;
}

void refuses_in_bulk() {
  alignas(128) static char ring[3 * 256];
  struct Bad {
    int pe, word;
    int64_t bytes;
    bool outside;
  };
  for (const Bad& bad : {Bad{1, 256, 512, false}, Bad{2, 256, 512, false}, Bad{-1, 256, 512, false},
                         Bad{0, kUserWords - 12, 512, false}, Bad{0, 256, 512, true}}) {
    Job job(2, 5000000000ull, 1);
    const std::vector<uint64_t> mine = job[0].heap, theirs = job[1].heap;
    const uint64_t* sig = bad.outside ? job[1].word(0) : nullptr;
    const uint64_t way =
        push_bulk<3, 256>(job[0].ctx(), kOpPut, job[0].word(bad.word), job[0].word(0), bad.bytes, bad.pe, sig, ring, 0);
    CHECK(way == kNotPushed && job[0].heap == mine && job[1].heap == theirs, "PE %d", bad.pe);
  }
}

// What `call` does wrong is recorded as said, aborts the job and touches no heap.
void refused(const char* what, std::function<void(Job&)> call, ErrorKind kind, Operation operation, int pe,
             const void* (*address)(Job&), uint64_t bytes, int unmapped = -1) {
  Job job(2, 5000000000ull, unmapped);
  const std::vector<uint64_t> mine = job[0].heap, theirs = job[1].heap;
  call(job);
  const ErrorRecord& e = job[0].error;
  CHECK(e.kind == kind && e.operation == operation && e.pe == pe, "%s: kind %u operation %u PE %d", what, e.kind,
        e.operation, e.pe);
  CHECK(e.bytes == bytes, "%s: %llu bytes", what, (unsigned long long)e.bytes);
  CHECK(address == nullptr || e.address == reinterpret_cast<uint64_t>(address(job)), "%s", what);
  CHECK(job[0].abort_word == 1 && job[0].ctx()->aborted == 1, "%s", what);
  CHECK(mine == job[0].heap && theirs == job[1].heap, "%s changed a heap", what);
}

const void* first(Job& job) { return job[0].word(0); }

void refuses_bad_pes() {
  for (int pe : {-1, 2, 3, int(kInlineBases), int(kInlineBases) + 5, INT_MAX, INT_MIN}) {
    auto ctx = [](Job& j) { return j[0].ctx(); };
    refused(
        "put", [&](Job& j) { put_some(ctx(j), j[0].word(0), j[0].word(1), 8, pe); }, kPeOutOfRange, kOpPut, pe, first,
        8);
    refused(
        "get", [&](Job& j) { get_some(ctx(j), j[0].word(1), j[0].word(0), 8, pe); }, kPeOutOfRange, kOpGet, pe, first,
        8);
    refused(
        "put_signal",
        [&](Job& j) { put_signal_some<SignalOp::set>(ctx(j), j[0].word(0), j[0].word(1), 8, pe, j[0].word(2), 1); },
        kPeOutOfRange, kOpPutSignal, pe, nullptr, 8);
    refused(
        "signal", [&](Job& j) { signal<SignalOp::set>(ctx(j), j[0].word(0), 1, pe); }, kPeOutOfRange, kOpSignal, pe,
        first, 8);
    refused(
        "put_value", [&](Job& j) { put_value(ctx(j), j[0].word(0), 1, pe); }, kPeOutOfRange, kOpPutValue, pe, first, 8);
    refused(
        "atomic", [&](Job& j) { atomic<AtomicOp::add>(ctx(j), j[0].word(0), 1, pe); }, kPeOutOfRange, kOpAtomic, pe,
        first, 8);
    refused(
        "remote", [&](Job& j) { CHECK(remote(ctx(j), j[0].word(0), pe) == j[0].word(0)); }, kPeOutOfRange, kOpRemote,
        pe, first, 0);
    if (pe == -1) continue; // means all PEs
    refused(
        "flush", [&](Job& j) { flush_wait(ctx(j), flush_async(ctx(j), pe)); }, kPeOutOfRange, kOpFlush, pe, nullptr, 0);
    refused("fence", [&](Job& j) { fence(ctx(j), pe); }, kPeOutOfRange, kOpFence, pe, nullptr, 0);
    refused("quiet", [&](Job& j) { quiet(ctx(j), pe); }, kPeOutOfRange, kOpQuiet, pe, nullptr, 0);
  }
}

void refuses_bad_addresses() {
  struct Bad {
    int64_t offset, bytes; // from the user's first byte
  };
  constexpr int64_t kUser = kHeap - kSystemBytes;
  for (Bad bad : {Bad{-8, 8}, Bad{-int64_t(kSystemBytes), 8}, Bad{-int64_t(kSystemBytes) - 8, 8}, Bad{kUser, 8},
                  Bad{kUser - 8, 16}, Bad{0, kUser + 1}, Bad{0, -1}, Bad{8, INT64_MAX}, Bad{0, INT64_MIN},
                  Bad{int64_t(1) << 45, 8}}) {
    auto at = [&](Job& j) { return reinterpret_cast<char*>(j[0].word(0)) + bad.offset; };
    refused(
        "put", [&](Job& j) { put_some(j[0].ctx(), at(j), j[0].word(1), bad.bytes, 1); }, kNotSymmetric, kOpPut, 1,
        nullptr, bad.bytes);
    refused(
        "get", [&](Job& j) { get_some(j[0].ctx(), j[0].word(1), at(j), bad.bytes, 1); }, kNotSymmetric, kOpGet, 1,
        nullptr, bad.bytes);
    refused(
        "put_signal",
        [&](Job& j) { put_signal_some<SignalOp::set>(j[0].ctx(), at(j), j[0].word(1), bad.bytes, 1, j[0].word(2), 1); },
        kNotSymmetric, kOpPutSignal, 1, nullptr, bad.bytes);
    if (bad.bytes != 8) continue;
    uint64_t* (*word)(Job&, int64_t) = [](Job& j, int64_t o) {
      return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(j[0].word(0)) + o);
    };
    refused(
        "its signal",
        [&](Job& j) {
          put_signal_some<SignalOp::set>(j[0].ctx(), j[0].word(0), j[0].word(1), 8, 1, word(j, bad.offset), 1);
        },
        kNotSymmetric, kOpPutSignal, 1, nullptr, 8);
    refused(
        "signal", [&](Job& j) { signal<SignalOp::add>(j[0].ctx(), word(j, bad.offset), 1, 1); }, kNotSymmetric,
        kOpSignal, 1, nullptr, 8);
    refused(
        "put_value", [&](Job& j) { put_value(j[0].ctx(), word(j, bad.offset), 1, 1); }, kNotSymmetric, kOpPutValue, 1,
        nullptr, 8);
    refused(
        "atomic", [&](Job& j) { atomic_cas(j[0].ctx(), word(j, bad.offset), 0, 1, 1); }, kNotSymmetric, kOpAtomic, 1,
        nullptr, 8);
  }
}

void refuses_what_is_not_mapped() {
  refused(
      "remote", [](Job& j) { CHECK(remote(j[0].ctx(), j[0].word(0), 1) == j[0].word(0)); }, kNotDirect, kOpRemote, 1,
      first, 0, 1);
  refused(
      "atomic", [](Job& j) { CHECK(atomic<AtomicOp::add>(j[0].ctx(), j[0].word(0), 1, 1) == 0); }, kUnsupported,
      kOpAtomic, 1, first, 8, 1);
}

void sends_nothing_after_an_abort() {
  Job job(2);
  Job::Pe &me = job[0], &peer = job[1];
  *me.word(0) = 5;
  put_some(me.ctx(), me.word(1), me.word(0), 8, 7);  // the first error
  put_some(me.ctx(), me.word(-1), me.word(0), 8, 1); // does not replace it
  CHECK(me.error.kind == kPeOutOfRange && me.error.pe == 7);
  const std::vector<uint64_t> before = peer.heap;
  put_some(me.ctx(), me.word(1), me.word(0), 8, 1);
  put_some(me.ctx(), me.word(1), me.word(0), 512, 1);
  put_signal_some<SignalOp::set>(me.ctx(), me.word(1), me.word(0), 8, 1, me.word(3), 1);
  put_signal_some<SignalOp::add>(me.ctx(), me.word(1), me.word(0), 512, 1, me.word(3), 1);
  signal<SignalOp::set>(me.ctx(), me.word(3), 1, 1);
  put_value(me.ctx(), me.word(3), 1, 1);
  CHECK(atomic<AtomicOp::add>(me.ctx(), me.word(3), 1, 1) == 0);
  CHECK(before == peer.heap);
  const auto start = std::chrono::steady_clock::now();
  CHECK((wait<kThread, Compare::eq>(me.ctx(), me.word(9), 1)) == 0);
  barrier_all(me.ctx());
  CHECK((test<Compare::eq>(me.ctx(), me.word(9), 1)));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
  CHECK(before == peer.heap && peer.error.kind == kNoError);
}

// Words are compared as signed numbers; the places around zero, the wrap of a counter and the ends are tried.
template <Compare C, class F>
void compares(F holds) {
  Job job(1);
  for (uint64_t seen :
       {uint64_t(0), uint64_t(1), uint64_t(41), uint64_t(42), uint64_t(43), uint64_t(1) << 63, ~uint64_t(0)})
    for (int64_t value : {int64_t(0), int64_t(1), int64_t(42), INT64_MIN, INT64_MAX, int64_t(-1)}) {
      *job[0].word(0) = seen;
      CHECK((test<C>(job[0].ctx(), job[0].word(0), value)) == holds(int64_t(seen), value), "%d %llx %llx", int(C),
            (unsigned long long)seen, (unsigned long long)value);
      if (holds(int64_t(seen), value)) CHECK((wait<kThread, C>(job[0].ctx(), job[0].word(0), value)) == seen);
    }
}

void waits_end() {
  {
    Job job(2, 30000000); // 30 ms
    *job[0].word(4) = 41;
    CHECK((wait<kThread, Compare::ge>(job[0].ctx(), job[0].word(4), 42)) == 41);
    const ErrorRecord& e = job[0].error;
    CHECK(e.kind == kWaitTimeout && e.operation == kOpWait && e.expected == 42 && e.observed == 41);
    CHECK(e.comparison == 1 + uint32_t(Compare::ge));
    CHECK(e.address == reinterpret_cast<uint64_t>(job[0].word(4)) && job[0].abort_word == 1);
  }
  {
    Job job(2);
    std::thread other([&] { __atomic_store_n(&job[0].abort_word, 1, __ATOMIC_RELEASE); });
    CHECK((wait<kThread, Compare::ge>(job[0].ctx(), job[0].word(4), 42)) == 0);
    other.join();
    CHECK(job[0].error.kind == kNoError && job[0].ctx()->aborted); // another PE's error
  }
  {
    Job job(3, 30000000); // of three PEs one never comes to the barrier
    std::thread other([&] { barrier_all(job[1].ctx()); });
    barrier_all(job[0].ctx());
    other.join();
    for (int i : {0, 1})
      CHECK(job[i].error.kind == kWaitTimeout && job[i].error.operation == kOpBarrier && job[i].error.pe == 2);
  }
}

// No PE leaves a barrier before all have come, in worlds of one round and of several.
void barriers(int n, bool node) {
  Job job(n, 60000000000ull);
  if (node) // two nodes; only the second one meets
    for (int i = 0; i < n; i++) job[i].ctx()->node_pe = i < 2 ? i : i - 2, job[i].ctx()->n_node_pes = i < 2 ? 2 : n - 2;
  const int from = node ? 2 : 0;
  constexpr int kRounds = 20;
  std::atomic<int> arrived[kRounds] = {};
  std::vector<std::thread> threads;
  for (int i = from; i < n; i++)
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; round++) {
        arrived[round]++;
        node ? barrier_node(job[i].ctx()) : barrier_all(job[i].ctx());
        CHECK(arrived[round] == n - from, "%d PEs: PE %d left barrier %d with %d there", n, i, round,
              arrived[round].load());
      }
    });
  for (auto& t : threads) t.join();
  for (int i = 0; i < n; i++) CHECK(job[i].error.kind == kNoError);
}

} // namespace

int main() {
  moves_data(2, 1);
  moves_data(140, 139); // beyond the bases that are loaded unchecked
  put_signals_of_all_sizes();
  for (uint32_t threads : {32, 64, 100, 128}) {
    pushes_in_bulk<Engine::automatic>(threads);
    pushes_in_bulk<Engine::bulk>(threads);
  }
  refuses_in_bulk();
  refuses_bad_pes();
  refuses_bad_addresses();
  refuses_what_is_not_mapped();
  sends_nothing_after_an_abort();
  compares<Compare::eq>([](int64_t a, int64_t b) { return a == b; });
  compares<Compare::ne>([](int64_t a, int64_t b) { return a != b; });
  compares<Compare::ge>([](int64_t a, int64_t b) { return a >= b; });
  compares<Compare::gt>([](int64_t a, int64_t b) { return a > b; });
  compares<Compare::le>([](int64_t a, int64_t b) { return a <= b; });
  compares<Compare::lt>([](int64_t a, int64_t b) { return a < b; });
  waits_end();
  for (int n : {1, 2, 3, 8, 32, 33, 70}) barriers(n, false);
  barriers(5, true);
  puts("ok");
}
