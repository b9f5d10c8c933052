// Barriers of all blocks of a launch, alone or together with the other PEs' launches.
//
// Blocks count themselves in; the last one sets the count back and moves the generation on, for which the others wait.
// So every barrier leaves the words as it found them, and the next one, of this launch or a later one, a replayed graph
// too, begins at once. Launches that run side by side have words of their own, by the id of their grid. Where two ids
// meet in the same words all the same, the sum of the marks that blocks leave shows it, and the job ends in an error.
#pragma once

#include "barrier.h"

namespace tsn {

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

  // Lets the others go, after everything that the last block did since it arrived.
  TSN_DEVICE void release() {
    platform::store<Order::relaxed, MemScope::gpu>(words, uint64_t(0));
    if constexpr (platform::kDefersRemoteWrites) platform::before_st<Order::release, MemScope::gpu>(words + 1);
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

// All blocks meet; the last one to come makes the call `together` with all its threads before anyone goes on.
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

// Returns when all blocks of this launch have called it, with all their threads. What any of them did before happened
// before what any of them does after. All blocks must run at the same time.
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
