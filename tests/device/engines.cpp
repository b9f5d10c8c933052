// The copy engines as host code: every thread of a block runs in turn, in random order, and each byte must arrive.
// Built with the address sanitizer, which sees every access outside the source and the target.
#define TSN_HOST_STANDALONE
#include "../native/check.h"
#include "tilescale_net.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

using namespace tsn;

namespace {

std::mt19937 rng(20261121);

void be_thread(uint32_t index, uint32_t threads) {
  sim::Thread& self = sim::self();
  self.linear = index;
  self.lane = index % 32;
  self.block_dim = {threads, 1, 1};
}

// Runs `f` as each of the threads. Those of a copy are independent, so any order must do.
template <class F>
void as_threads(uint32_t threads, F f) {
  std::vector<uint32_t> order(threads);
  for (uint32_t i = 0; i < threads; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  for (uint32_t i : order) {
    be_thread(i, threads);
    f();
  }
}

// `bytes` random bytes at `offset` modulo 128, and nothing after them: the sanitizer guards what follows.
struct Bytes {
  std::unique_ptr<char, decltype(&free)> memory;
  size_t offset, bytes;

  Bytes(size_t n, size_t at) : memory(nullptr, free), offset(at), bytes(n) {
    void* p = nullptr;
    CHECK(posix_memalign(&p, 128, at + n) == 0);
    memory.reset(static_cast<char*>(p));
    for (size_t i = 0; i < at + n; i++) memory.get()[i] = char(rng());
  }
  char* begin() const { return memory.get() + offset; }
  std::vector<char> all() const { return std::vector<char>(memory.get(), begin() + bytes); }
};

constexpr int kStages = 3, kStageBytes = 256;
alignas(128) char ring[kStages * kStageBytes];

// A copy in bulk, or one that is given up before its target is known, by one thread.
template <int Stages>
void in_bulk(size_t bytes, bool cancel) {
  const size_t to = rng() % 8 * 16;
  const Bytes source(bytes, rng() % 8 * 16), target(bytes, to);
  std::vector<char> expected = target.all();
  if (!cancel) std::copy(source.begin(), source.begin() + bytes, expected.begin() + to);
  be_thread(0, 1);
  alignas(128) char stages[Stages * kStageBytes];
  BulkCopy<Stages, kStageBytes> bulk(source.begin(), bytes, stages, target.begin());
  bulk.begin();
  if (cancel) bulk.cancel();
  else bulk.finish(target.begin());
  CHECK(target.all() == expected, "%zu bytes in bulk, %d stages", bytes, Stages);
  if (cancel || bytes <= Stages * 128) return;
  bool found = false; // the second stage's last contents begin with a segment of the target
  for (size_t at = (0 - to) % 128; at + 16 <= bytes; at += 128)
    found |= std::equal(stages + kStageBytes, stages + kStageBytes + 16, source.begin() + at);
  CHECK(found, "%zu bytes to +%zu, %d stages", bytes, to, Stages);
}

template <Scope S, Engine E, int Unroll>
void one(uint32_t threads, size_t bytes, size_t to, size_t from) {
  const Bytes source(bytes, from), target(bytes, to);
  std::vector<char> expected = target.all();
  std::copy(source.begin(), source.begin() + bytes, expected.begin() + to);
  constexpr bool kRing = S == Scope::block && E != Engine::ldst;
  as_threads(S == Scope::thread ? 1 : threads, [&] {
    copy<S, E, Unroll, kRing ? kStages : 0, kRing ? kStageBytes : 0>(target.begin(), source.begin(), bytes, ring,
                                                                     Direction::push);
  });
  for (size_t i = 0; i < to + bytes; i++)
    CHECK(target.memory.get()[i] == expected[i],
          "scope %d engine %d unroll %d: %zu bytes by %u threads to +%zu from +%zu, "
          "at byte %zd",
          int(S), int(E), Unroll, bytes, threads, to, from, ssize_t(i) - ssize_t(to));
}

template <Scope S, Engine E, int Unroll>
void many(uint32_t threads, size_t most, int rounds) {
  for (size_t bytes = 0; bytes < 70; bytes++) one<S, E, Unroll>(threads, bytes, rng() % 128, rng() % 128);
  for (int i = 0; i < rounds; i++) {
    const size_t alignment = size_t(1) << rng() % 6, to = rng() % 128;
    // Both ends agree modulo `alignment`; the size is near a multiple of it as often as not.
    const size_t from = (to + alignment * (rng() % 128)) % 128;
    size_t bytes = rng() % most;
    if (rng() % 2) bytes = std::min(most, bytes / alignment * alignment + rng() % 3);
    one<S, E, Unroll>(threads, bytes, to, from);
  }
}

// The first tile of a copy, which is all of it when it is small.
template <Scope S, int Rows, uint32_t Group = 128>
void first_tile(uint32_t threads, bool allow_partial) {
  const uint32_t members = S == Scope::thread ? 1 : S == Scope::warp ? 32 : threads;
  int complete = 0, partial = 0;
  for (int i = 0; i < 3000; i++) {
    const size_t unit = size_t(1) << rng() % 5, bytes = rng() % (members * Rows + members / 2 + 2) * unit;
    const size_t to = rng() % 8 * unit, from = rng() % 8 * unit;
    const Bytes source(bytes, from), target(bytes, to);
    std::vector<char> expected = target.all();
    bool all = true;
    size_t done = 0;
    as_threads(S == Scope::thread ? 1 : threads, [&] {
      FirstTile<S, Rows, Group> copy(target.begin(), source.begin(), int64_t(bytes), allow_partial);
      all = copy.complete;
      done = copy.bytes;
      if (copy.warp_has_no_work()) return;
      copy.load(source.begin());
      copy.store(target.begin());
    });
    const uint32_t grouped = members < Group ? members : members / Group * Group;
    if (unit >= 4 && bytes <= unit * (unit == 16 ? grouped * Rows : members))
      CHECK(all, "%zu bytes in units of %zu by %u", bytes, unit, members);
    CHECK(all ? done == bytes : done <= bytes && (allow_partial || done == 0), "%zu of %zu bytes", done, bytes);
    std::copy(source.begin(), source.begin() + done, expected.begin() + to);
    complete += all;
    partial += !all && done != 0;
    CHECK(target.all() == expected, "%zu bytes by %u threads", bytes, members);
  }
  CHECK(complete > 200);
  CHECK(!allow_partial || partial > 20);
}

} // namespace

int main() {
  for (size_t to = 0; to < 32; to++) // every alignment of small copies
    for (size_t from = 0; from < 32; from++)
      for (size_t bytes : {0, 1, 15, 16, 17, 33, 63}) {
        one<Scope::block, Engine::ldst, 8>(64, bytes, to, from);
        one<Scope::block, Engine::bulk, 8>(32, bytes, to, from);
        one<Scope::thread, Engine::ldst, 4>(1, bytes, to, from);
      }
  for (uint32_t threads : {1, 7, 31, 32, 33, 48, 96, 128, 1000, 1024}) {
    many<Scope::block, Engine::ldst, 8>(threads, 40000, 30);
    many<Scope::block, Engine::bulk, 8>(threads, 9000, 20);
  }
  many<Scope::block, Engine::ldst, 1>(64, 9000, 60);
  many<Scope::block, Engine::ldst, 6>(64, 90000, 60);
  many<Scope::block, Engine::ldst, 32>(128, 400000, 60);
  many<Scope::block, Engine::automatic, 32>(128, 400000, 30);
  many<Scope::warp, Engine::automatic, 16>(32, 40000, 100);
  many<Scope::thread, Engine::automatic, 4>(1, 3000, 200);
  first_tile<Scope::thread, 1>(1, false);
  first_tile<Scope::warp, 1>(32, true);
  for (const uint32_t threads : {20u, 32u, 48u, 128u})
    for (const bool allow_partial : {false, true}) {
      first_tile<Scope::block, 4>(threads, allow_partial);
      first_tile<Scope::block, 4, 32>(threads, allow_partial);
    }
  for (const bool cancel : {false, true}) {
    for (size_t bytes = 16; bytes <= 6 * kStages * kStageBytes; bytes += 16) in_bulk<kStages>(bytes, cancel);
    for (size_t bytes = 16; bytes <= 30 * kStageBytes; bytes += 16)
      in_bulk<2>(bytes, cancel), in_bulk<10>(bytes, cancel);
  }
  puts("ok");
}
