// Barriers and warp operations: where threads of a grid meet.
#include "grid.h"

#include "tilescale_net/device/context.h"

#include <stdio.h>

namespace tsn {
namespace sim {

void Grid::release(Barrier& barrier, bool orders) {
  if (orders) meet(barrier.waiting, std::move(barrier.passed));
  if (scheduler) scheduler->meet(barrier.waiting);
  begin_lag(*running_->block);
  for (Fiber* fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
  barrier.passed.clear();
  barrier.arrived = barrier.expected = 0;
  progress_ = strong_progress_ = true;
}

void Grid::block_barrier(int id, int count, bool arrive_only) { meet_block(id, count, arrive_only, true); }

// `orders`: whether a GPU has this barrier, too.
void Grid::meet_block(int id, int count, bool arrive_only, bool orders) {
  Fiber& self = *running_;
  const bool puts = self.announced && (self.call.operation == kOpPut || self.call.operation == kOpPutSignal);
  if (count <= 0) count = static_cast<int>(threads_per_block_);
  if (id < 0 || id > 15) fail(Failure::kernel, "barrier " + std::to_string(id) + " does not exist; there are 16");
  Barrier& barrier = self.block->barriers[id];
  if (barrier.arrived == 0) barrier.expected = count;
  if (barrier.expected != count)
    fail(Failure::kernel, "barrier " + std::to_string(id) + " is used with " + std::to_string(count) +
                              " threads while others wait there for " + std::to_string(barrier.expected));
  if (id == 0 && !barrier.waiting.empty()) compare_calls(*barrier.waiting.front());
  ++barrier.arrived;
  if (arrive_only && order_) barrier.passed.push_back(warp_number(self));
  if (barrier.arrived == barrier.expected) {
    release(barrier, orders);
    self.announced = false;
    self.in_put = puts;
    // The last one to arrive is as likely to be overtaken as any other.
    if (!arrive_only && !scheduler && (lags(self) || random_.below(2))) yield(false);
    return;
  }
  if (arrive_only) return;
  self.state = State::block_barrier;
  barrier.waiting.push_back(&self);
  leave();
  self.announced = false;
  self.in_put = puts;
}

uint64_t Grid::block_vote(VoteOp op, uint64_t value) {
  Block& block = *running_->block;
  block.votes += value != 0;
  if (op == VoteOp::broadcast && running_->view.linear == 0) block.next_value = value;
  if (block.barriers[0].arrived + 1 == static_cast<int>(threads_per_block_)) {
    // No thread can overwrite these before every thread has come here again.
    block.vote_result = block.votes;
    block.value = block.next_value;
    block.votes = 0;
  }
  // Within a put, the simulator uses a broadcast to decide whether it is to be late, which orders nothing on a GPU.
  meet_block(0, 0, false, !(op == VoteOp::broadcast && running_->in_put));
  switch (op) {
  case VoteOp::all:
    return block.vote_result == static_cast<int>(threads_per_block_);
  case VoteOp::any:
    return block.vote_result != 0;
  case VoteOp::broadcast:
    return block.value;
  default:
    return static_cast<uint64_t>(block.vote_result);
  }
}

void Grid::grid_barrier() {
  if (blocks_ > launch_.resident_blocks)
    fail(Failure::kernel, "a grid barrier needs all " + std::to_string(blocks_) +
                              " blocks to be resident, but the simulated GPU holds " +
                              std::to_string(launch_.resident_blocks) + " (TSN_SIM_SMS sets its size)");
  if (++grid_arrived_ == blocks_ * threads_per_block_) {
    grid_arrived_ = 0;
    meet(grid_waiting_, {});
    if (scheduler) scheduler->meet(grid_waiting_);
    for (Fiber* fiber : grid_waiting_) wake(fiber);
    grid_waiting_.clear();
    return;
  }
  running_->state = State::grid_barrier;
  grid_waiting_.push_back(running_);
  leave();
}

uint64_t Grid::warp(WarpOp op, uint32_t mask, uint64_t value, uint32_t argument) {
  Fiber& self = *running_;
  const unsigned index = self.view.linear / 32;
  Warp& warp = self.block->warps[index];
  const uint32_t own = 1u << self.view.lane;
  mask &= warp.members; // lanes beyond the end of the block take no part
  char what[160];
  if (!(mask & own)) {
    snprintf(what, sizeof(what), "lane %u calls a warp operation whose mask 0x%08x leaves it out", self.view.lane,
             mask);
    fail(Failure::kernel, what);
  }
  if (mask & warp.exited) {
    snprintf(what, sizeof(what), "warp operation with mask 0x%08x, but the lanes 0x%08x of it have ended", mask,
             mask & warp.exited);
    fail(Failure::kernel, what);
  }
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.argument = argument;
  size_t i = 0;
  for (; i < warp.pending_ops.size(); ++i) {
    PendingWarpOp& m = warp.pending_ops[i];
    if (!(m.mask & mask)) continue;
    if (m.mask == mask && m.op == op) break;
    if ((m.arrived & mask) && (m.mask & own)) {
      snprintf(what, sizeof(what),
               "lanes of one warp meet in different operations: this one has mask 0x%08x, lanes 0x%08x wait with mask "
               "0x%08x%s",
               mask, m.arrived, m.mask, m.op == op ? "" : " in another kind of operation");
      fail(Failure::kernel, what);
    }
  }
  if (i == warp.pending_ops.size()) warp.pending_ops.push_back({op, mask, 0});
  warp.pending_ops[i].arrived |= own;
  if (warp.pending_ops[i].arrived == mask) {
    const PendingWarpOp pending = warp.pending_ops[i];
    warp.pending_ops[i] = warp.pending_ops.back();
    warp.pending_ops.pop_back();
    complete(*self.block, index, pending);
  } else {
    self.state = State::warp;
    leave();
  }
  self.announced = false;
  return self.result;
}

void Grid::complete(Block& block, unsigned index, const PendingWarpOp& pending) {
  Fiber* lanes = &block.threads[index * 32];
  const auto each = [&](auto f) {
    for (uint32_t rest = pending.mask; rest; rest &= rest - 1) f(__builtin_ctz(rest));
  };
  uint64_t ballot = 0;
  bool equal = true;
  const uint64_t first = lanes[__builtin_ctz(pending.mask)].value;
  each([&](int i) {
    if (lanes[i].announced || running_->announced) compare_calls(lanes[i]);
    ballot |= static_cast<uint64_t>(lanes[i].value != 0) << i;
    equal = equal && lanes[i].value == first;
  });
  each([&](int i) {
    Fiber& lane = lanes[i];
    switch (pending.op) {
    case WarpOp::sync:
      lane.result = 0;
      break;
    case WarpOp::ballot:
      lane.result = ballot;
      break;
    case WarpOp::match_all:
      lane.result = equal ? pending.mask : 0;
      break;
    case WarpOp::match_any: {
      uint64_t same = 0;
      each([&](int j) { same |= static_cast<uint64_t>(lanes[j].value == lane.value) << j; });
      lane.result = same;
      break;
    }
    case WarpOp::shuffle:
      // A lane outside the mask has no value to give: hardware returns anything, here all bits are set.
      lane.result = pending.mask >> (lane.argument & 31) & 1 ? lanes[lane.argument & 31].value : ~0ull;
      break;
    }
  });
  if (order_ && launch_.races && pending.op == WarpOp::sync) {
    const Warp& warp = block.warps[index];
    order_->lanes_meet(warp_number(*running_), pending.mask, !(warp.members & ~warp.exited & ~pending.mask));
    restamp();
  }
  if (scheduler) {
    std::vector<Fiber*> others;
    each([&](int i) { others.push_back(&lanes[i]); });
    scheduler->meet(others);
  }
  each([&](int i) {
    if (&lanes[i] != running_) wake(&lanes[i]);
  });
}

uint32_t Grid::active_mask(const void* site) {
  Fiber& self = *running_;
  const uint32_t own = 1u << self.view.lane;
  // Any set of lanes that are here together is right. One time in four the warp has diverged completely; otherwise the
  // others get a turn to arrive first.
  if (!scheduler && random_.below(4) == 0) return own;
  self.site = site;
  self.converged = false;
  yield(false);
  if (!self.converged) {
    Fiber* lanes = &self.block->threads[self.view.linear - self.view.lane];
    const Warp& warp = self.block->warps[self.view.linear / 32];
    uint32_t mask = 0;
    for (uint32_t rest = warp.members & ~warp.exited; rest; rest &= rest - 1) {
      const int i = __builtin_ctz(rest);
      if (lanes[i].site == site && !lanes[i].converged) mask |= 1u << i;
    }
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      lanes[__builtin_ctz(rest)].converged = true;
      lanes[__builtin_ctz(rest)].result = mask;
    }
  }
  self.site = nullptr;
  return static_cast<uint32_t>(self.result);
}

} // namespace sim
} // namespace tsn
