// Fibers, barriers, warp operations and faults of the simulator, without Python and without generated code.
#include "check.h"

#include "tilescale_net/csrc/simulator/kernel.h"
#include "tilescale_net/csrc/simulator/memory.h"
#include "tilescale_net/csrc/simulator/race_memory.h"
#include "tilescale_net/csrc/simulator/remote.h"

#include <chrono>
#include <sched.h>
#include <set>
#include <string.h>
#include <string>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vector>

using namespace tsn::sim;

void test_explore(); // explore_test.cpp

namespace {

Thread* self = nullptr;
Grid& grid() { return *current_grid; }

Launch launch(void (*entry)(const uint64_t*), uint64_t seed, Index3 blocks = {3, 1, 1}, Index3 threads = {64, 2, 1}) {
  Launch l;
  l.entry = entry;
  l.self = &self;
  l.grid = blocks;
  l.block = threads;
  l.seed = seed;
  l.resident_blocks = 8;
  l.stall_seconds = 5;
  return l;
}
Outcome go(const Launch& l) { return run(l, 64 * 1024); }

double sums[3][128];

// Local variables, floating-point state and the identity of a thread survive switches.
void keeps_state(const uint64_t*) {
  const unsigned i = self->linear, b = self->linear_block;
  double x = i * 0.5;
  for (int round = 0; round < 20; ++round) {
    x = x * 1.25 + 1;
    grid().block_barrier(0, 0, false);
    x += 1e-3 * static_cast<double>(grid().warp(WarpOp::shuffle, ~0u, i, (i + 1) & 31));
    if (round % 3 == 0) grid().yield(false);
    CHECK(self->linear == i && self->linear_block == b);
    CHECK(self->thread_idx.x == i % 64 && self->thread_idx.y == i / 64);
  }
  sums[b][i] = x;
}

void test_state() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    memset(sums, 0, sizeof(sums));
    CHECK(go(launch(keeps_state, seed)).failure == Failure::none);
    for (unsigned i = 0; i < 128; ++i) {
      double x = i * 0.5;
      for (int round = 0; round < 20; ++round)
        x = x * 1.25 + 1 + 1e-3 * static_cast<double>((i & ~31u) | ((i + 1) & 31));
      for (auto& block : sums) CHECK(block[i] == x);
    }
  }
}

std::vector<unsigned> order;
void notes_order(const uint64_t*) {
  grid().yield(false);
  order.push_back(self->linear);
}

void test_seeds() {
  std::set<std::vector<unsigned>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::vector<unsigned> first;
    for (int again = 0; again < 2; ++again) {
      order.clear();
      CHECK(go(launch(notes_order, seed, {1, 1, 1}, {32, 1, 1})).failure == Failure::none);
      if (!again) first = order;
    }
    CHECK(order == first && order.size() == 32);
    orders.insert(order);
  }
  CHECK(orders.size() >= 5);
}

// Lanes of a full warp split into masks of their own; both halves meet independently.
void meets_in_halves(const uint64_t*) {
  const uint32_t half = self->lane < 16 ? 0xffffu : 0xffff0000u;
  CHECK(grid().warp(WarpOp::ballot, half, self->lane % 2, 0) == (0xaaaaaaaau & half));
  CHECK(grid().warp(WarpOp::match_any, half, self->lane % 4, 0) == ((0x11111111u << self->lane % 4) & half));
  CHECK(grid().warp(WarpOp::match_all, half, 7, 0) == half);
  CHECK(grid().warp(WarpOp::match_all, half, self->lane, 0) == 0);
  const uint32_t together = grid().active_mask(sums); // any address stands for the place
  CHECK(together >> self->lane & 1);
  // The lanes that are reported to be here together agree on it.
  CHECK(grid().warp(WarpOp::match_all, together, together, 0) == together);
  CHECK(grid().block_vote(VoteOp::count, self->lane == 3) == 4);
  CHECK(grid().block_vote(VoteOp::broadcast, self->linear + 100) == 100);
  CHECK(grid().block_vote(VoteOp::all, 1) == 1 && grid().block_vote(VoteOp::any, 0) == 0);
}

void test_warps() {
  for (uint64_t seed = 0; seed < 20; ++seed) CHECK(go(launch(meets_in_halves, seed)).failure == Failure::none);
}

void waits_alone(const uint64_t*) {
  if (self->linear == 5) grid().block_barrier(2, 64, false);
}
// Portable fibers cannot leave a signal handler, and the address sanitizer has its own idea of both faults.
#if !defined(TSN_SIM_PORTABLE_FIBERS) && !defined(__SANITIZE_ADDRESS__)
#define TEST_FAULTS
void reads_nothing(const uint64_t*) {
  if (self->linear == 3) *reinterpret_cast<volatile int*>(16) = 1;
  grid().block_barrier(0, 0, false);
}
void needs_stack(const uint64_t*) {
  volatile char big[1 << 18];
  for (int i = (1 << 18) - 1; i >= 0; i -= 64) big[i] = 1;
  CHECK(big[63] == 1);
}
#endif

void test_failures() {
  Outcome o = go(launch(waits_alone, 1));
  CHECK(o.failure == Failure::deadlock && o.message.find("1 of 64 threads at named barrier 2") != std::string::npos);
#ifdef TEST_FAULTS
  o = go(launch(reads_nothing, 1));
  CHECK(o.failure == Failure::out_of_bounds && o.message.find("thread (3, 0, 0)") != std::string::npos);
  o = go(launch(needs_stack, 1));
  CHECK(o.failure == Failure::kernel && o.message.find("more than its stack of 65536 bytes") != std::string::npos);
#endif
  CHECK(go(launch(keeps_state, 1)).failure == Failure::none);
}

// Remote writes: the heap of "PE 1" is another array of this process.
alignas(64) char mine[1 << 16], theirs[1 << 16];
uint64_t* word(char* heap, int i) { return reinterpret_cast<uint64_t*>(heap) + i; }
constexpr int kData = 4096, kBytes = 20000;

void put(int at, int bytes, int signal, uint64_t value) {
  RemoteOperation o = {"put", mine + at, theirs + at, mine + at, bytes, value, nullptr, nullptr, false, 1};
  if (signal >= 0) {
    o.signal = word(mine, signal);
    o.peer_signal = word(theirs, signal);
  }
  if (kRemoteApi.defer(o)) return;
  memcpy(theirs + at, mine + at, static_cast<size_t>(bytes));
  if (signal >= 0) *word(theirs, signal) = value;
}

bool overtaken = false;
void sends(const uint64_t*) {
  memset(mine + kData, 7, kBytes + 128);
  put(kData, kBytes, -1, 0);     // unordered
  put(kData + kBytes, 64, 0, 1); // its signal may overtake the first put, never its own data
  kRemoteApi.fence(1);
  put(kData + kBytes + 64, 64, 1, 1); // its signal comes after everything
  for (;;) {
    grid().yield(true);
    const bool first = *word(theirs, 0) != 0, second = *word(theirs, 1) != 0;
    if (first) CHECK(theirs[kData + kBytes] == 7 && theirs[kData + kBytes + 63] == 7);
    if (first && !second && memchr(theirs + kData, 0, kBytes)) overtaken = true;
    if (second) CHECK(!memchr(theirs + kData, 0, kBytes + 128));
    if (second) return;
  }
}

void source_is_read_late(const uint64_t*) {
  memset(mine + kData, 7, kBytes);
  put(kData, kBytes, -1, 0);
  memset(mine + kData, 8, kBytes);
  kRemoteApi.quiet(-1);
  CHECK(theirs[kData] == 8 && theirs[kData + kBytes - 1] == 8);
  CHECK(pending_operations() == 0);
}

void test_remote() {
  register_heap(reinterpret_cast<uint64_t>(mine), sizeof(mine));
  register_allocation(reinterpret_cast<uint64_t>(mine), sizeof(mine), "all");
  set_visibility(Visibility::late);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    memset(theirs, 0, sizeof(theirs));
    CHECK(go(launch(sends, seed, {1, 1, 1}, {1, 1, 1})).failure == Failure::none);
    flush_pending();
    CHECK(go(launch(source_is_read_late, seed, {1, 1, 1}, {1, 1, 1})).failure == Failure::none);
  }
  CHECK(overtaken);
  set_visibility(Visibility::random);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    memset(theirs, 0, sizeof(theirs));
    CHECK(go(launch(sends, seed, {1, 1, 1}, {1, 1, 1})).failure == Failure::none);
    flush_pending();
  }
}

void test_ranges() {
  unregister_heap(reinterpret_cast<uint64_t>(mine));
  CHECK(check_range(reinterpret_cast<uint64_t>(mine), 2 * sizeof(mine)).empty()); // no heap, no opinion
  CHECK(check_range(1000, 50).empty());
  register_heap(1000, 1000);
  register_allocation(1100, 100, "first");
  register_allocation(1300, 50, "second");
  CHECK(check_range(1100, 100).empty() && check_range(1199, 1).empty() && check_range(1300, 50).empty());
  CHECK(check_range(1250, 0).empty());
  CHECK(check_range(1100, 101).find("1 bytes past the end of first") != std::string::npos);
  CHECK(check_range(1250, 8).find("begin 50 bytes past the end of first") != std::string::npos);
  CHECK(!check_range(1000, 8).empty() && !check_range(1099, 2).empty());
  CHECK(!check_range(1100, ~0ull).empty()); // no wrap-around
  unregister_allocation(1100);
  CHECK(!check_range(1100, 8).empty());
  register_heap(2000, 1000); // another one, right behind
  register_allocation(2000, 10, "neighbour");
  unregister_heap(1000);
  CHECK(check_range(1300, 500).empty());
  CHECK(check_range(2000, 10).empty() && check_range(2000, 11).find("past the end of neighbour") != std::string::npos);
  unregister_heap(2000);
}

bool slow_turns = false;

// A rank that was killed, or has no processor, has begun a message. It is waited for by time: the turns of a busy
// machine may take milliseconds each, and neither the deadline of a wait nor an abort ends this loop.
void test_message_of_a_killed_rank() {
  std::vector<char> memory[2];
  for (auto& one : memory) one.resize(race_memory_bytes(64));
  std::vector<uint64_t> pages = {reinterpret_cast<uint64_t>(memory[0].data()),
                                 reinterpret_cast<uint64_t>(memory[1].data())};
  attach_race_memory(0, 4096, 64, pages, {4096, 8192});
  RaceMemory& ours = *race_memory(4096);
  ours.own().messages = 1;
  const auto begin = std::chrono::steady_clock::now();
  slow_turns = true;
  const uint64_t read = ours.receive(0, nothing_known()).read;
  slow_turns = false;
  CHECK(read == 1 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  detach_race_memory(4096);
}

} // namespace

// In the place of the C library's.
extern "C" int sched_yield() noexcept {
  const timespec nap{0, 1'000'000};
  if (slow_turns) nanosleep(&nap, nullptr);
  return static_cast<int>(syscall(SYS_sched_yield));
}

int main() {
  test_state();
  test_seeds();
  test_warps();
  test_failures();
  test_remote();
  test_ranges();
  test_message_of_a_killed_rank();
  test_explore();
  printf("ok\n");
}
