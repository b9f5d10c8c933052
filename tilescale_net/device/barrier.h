// Barriers among PEs, called by all threads of one block per PE.
//
// A dissemination barrier: in round r a PE signals those at distances j * K^r (0 < j < K) and waits for those at the
// same distances behind it. Up to 32 PEs K is 32, so one round does: each signals every other. Above, K is 4, and the
// flags of all rounds still fit. Flags hold the number of the barrier and only grow, so nothing is ever reset, and a PE
// that runs ahead by one barrier does no harm.
#pragma once

#include "signal.h"
#include "wait.h"

namespace tsn {

namespace detail {

template <int K>
TSN_DEVICE void disseminate(const Context* ctx, uint64_t* flags, uint64_t number, int first, int me, int n) {
  const uint32_t threads = platform::block_threads();
  const uint32_t lanes = threads < platform::kWarpThreads ? threads : platform::kWarpThreads;
  uint64_t* round = flags - 1; // no flag for distance 0
  for (int64_t distance = 1; distance < n; distance *= K, round += K - 1) {
    platform::fence<MemScope::sys>();
    for (uint32_t j = platform::thread_index() + 1; j < K && j * distance < n; j += lanes) {
      const int64_t to = me + j * distance;
      send_signal<SignalOp::set>(PeerAccess(ctx, first + int(to < n ? to : to - n)), round + j, number);
    }
    for (uint32_t j = platform::thread_index() + 1; j < K && j * distance < n; j += lanes) {
      const int64_t from = me - j * distance;
      wait_one<Compare::ge>(ctx, round + j, int64_t(number), kOpBarrier, first + int(from < 0 ? from + n : from));
    }
    platform::warp_sync(); // all lanes forward one lane's knowledge in the next round
  }
}

// In the simulator two blocks of a PE in a barrier at the same time are an error; elsewhere they count it twice, or
// once.
TSN_DEVICE void enter_alone(const Context* ctx, uint64_t* entered) {
  if (platform::thread_index() != 0) return;
  if (platform::atomic<AtomicOp::exch, Order::relaxed, MemScope::gpu>(entered, uint64_t(1)) != 0)
    fail(ctx, kBarriersOverlap, kOpBarrier, -1, nullptr, 0, 0, 0);
}

// Among PEs first .. first + n - 1, of which this is number `me`.
TSN_DEVICE void barrier(const Context* ctx, int flags_word, int count_word, int first, int me, int n) {
  static_assert(31 <= kBarrierRounds && 3 * 10 <= kBarrierRounds, "32 PEs in one round, 4^10 in ten, fit the flags");
  uint64_t* area = reinterpret_cast<uint64_t*>(platform::load_constant(&ctx->heap_base));
  scope_enter<Scope::block>(kOpBarrier, nullptr, nullptr, 0, kNoPe);
  if constexpr (platform::kDefersRemoteWrites) enter_alone(ctx, area + kBarrierEntered);
  if (platform::thread_index() < platform::kWarpThreads) {
    const uint64_t number = platform::load<Order::relaxed, MemScope::gpu>(area + count_word) + 1;
    platform::warp_sync();
    if (platform::thread_index() == 0) platform::store<Order::relaxed, MemScope::gpu>(area + count_word, number);
    if (n <= 32) disseminate<32>(ctx, area + flags_word, number, first, me, n);
    else disseminate<4>(ctx, area + flags_word, number, first, me, n);
  }
  platform::block_sync();
  if constexpr (platform::kDefersRemoteWrites)
    if (platform::thread_index() == 0)
      platform::store<Order::relaxed, MemScope::gpu>(area + kBarrierEntered, uint64_t(0));
}

} // namespace detail

// Returns when all PEs have called it. Writes that were quiet before are visible after it to the block's threads. One
// block of a PE at a time.
TSN_DEVICE void barrier_all(const Context* ctx) {
  detail::barrier(ctx, kWorldBarrierFlags, kWorldBarrierCount, 0, my_pe(ctx), n_pes(ctx));
}

// The same among the PEs of this node.
TSN_DEVICE void barrier_node(const Context* ctx) {
  const int me = node_pe(ctx);
  detail::barrier(ctx, kNodeBarrierFlags, kNodeBarrierCount, my_pe(ctx) - me, me, n_node_pes(ctx));
}

// --- barriers of all blocks of a launch ------------------------------------------------------------------------------
// Barriers of all blocks of a launch, alone or together with the other PEs' launches.
//
// Blocks count themselves in; the last one resets the count and advances the generation, for which the others wait.
// So every barrier leaves the words as it found them, and the next one, of this launch or a later one, or of a
// replayed graph, begins at once. Concurrent launches have their own words, by the id of their grid. If two ids still
// share words, the sum of the blocks' marks shows it, and the job ends in an error.

enum class BarrierScope { block, grid };

namespace detail {

class GridBarrier {
public:
  TSN_DEVICE GridBarrier(const Context* context, Operation name) : ctx(context), operation(name) {
    const uint32_t id = platform::grid_id();
    words = reinterpret_cast<uint64_t*>(platform::load_constant(&ctx->heap_base)) + kGridBarrierWords +
            int(id % kGridBarriers) * kGridBarrierStride;
    blocks = platform::grid_blocks();
    mark = id & 0xffff;
  }

  // Counts the calling block in, after everything that all its threads did before. Whether it is the last one. By one
  // thread, which makes the next call as well.
  TSN_DEVICE bool arrive() {
    generation = platform::load<Order::relaxed, MemScope::gpu>(words + 1);
    const uint64_t one = mark << kMarkShift | 1;
    const uint64_t sum = platform::atomic<AtomicOp::add, Order::acq_rel, MemScope::gpu>(words, one) + one;
    if ((sum & kCountMask) < blocks) return false;
    if (TSN_UNLIKELY(sum != (mark * blocks << kMarkShift | blocks)))
      fail(ctx, kBarriersOverlap, operation, -1, nullptr, 0, 0, 0);
    return true;
  }

  // Releases the others, after everything that the last block did since it arrived.
  TSN_DEVICE void release() {
    platform::store<Order::relaxed, MemScope::gpu>(words, uint64_t(0));
    if constexpr (platform::kDefersRemoteWrites)
      platform::before_st<Order::release, MemScope::gpu>(words + 1, generation + 1);
    platform::store<Order::release, MemScope::gpu>(words + 1, generation + 1);
  }

  TSN_DEVICE void wait() const {
    uint64_t arrived;
    do {
      arrived = 0;
      spin(
          ctx, [&] { return SpinSubject{operation}; },
          [&] { return platform::load<Order::acquire, MemScope::gpu>(words + 1) != generation; },
          [&] {
            arrived = platform::load<Order::relaxed, MemScope::gpu>(words) & kCountMask;
            if (arrived < blocks) fail(ctx, kWaitTimeout, operation, -1, nullptr, blocks, arrived, 0);
          });
    } while (arrived == blocks); // the last block waits for other PEs, within a deadline of its own
    if constexpr (platform::kDefersRemoteWrites) platform::after_ld<Order::acquire, MemScope::gpu>(words + 1);
  }

private:
  static constexpr int kMarkShift = 24;
  static constexpr uint64_t kCountMask = (uint64_t(1) << kMarkShift) - 1;
  const Context* ctx;
  Operation operation;
  uint64_t* words; // count and marks, generation
  uint64_t blocks, mark, generation;
};

// All blocks meet; the last one to come calls `together` with all its threads before any continues.
template <class Together>
TSN_DEVICE void meet_grid(const Context* ctx, Operation operation, Together together) {
  GridBarrier barrier(ctx, operation);
  platform::block_sync();
  const bool last = platform::block_broadcast([&] { return uint64_t(barrier.arrive()); }) != 0;
  if (last) together();
  if (platform::thread_index() == 0) {
    if (last) barrier.release();
    else barrier.wait();
  }
  platform::block_sync();
}

} // namespace detail

// Returns when all threads of all blocks of this launch have called it. Everything before it in any of them happened
// before everything after it in any. All blocks must run at the same time.
TSN_DEVICE void barrier_grid(const Context* ctx) {
  detail::GridBarrier barrier(ctx, kOpBarrierGrid);
  platform::block_sync();
  if (platform::thread_index() == 0) {
    if (barrier.arrive()) barrier.release();
    else barrier.wait();
  }
  platform::block_sync();
}

// barrier_all() and barrier_node() by one block of each PE, or by all blocks of each PE's launch, which meet too.
template <BarrierScope S>
TSN_DEVICE void barrier_all(const Context* ctx) {
  if constexpr (S == BarrierScope::block) barrier_all(ctx);
  else detail::meet_grid(ctx, kOpBarrierGrid, [&] { barrier_all(ctx); });
}
template <BarrierScope S>
TSN_DEVICE void barrier_node(const Context* ctx) {
  if constexpr (S == BarrierScope::block) barrier_node(ctx);
  else detail::meet_grid(ctx, kOpBarrierGrid, [&] { barrier_node(ctx); });
}

} // namespace tsn
