// Reports of primitives to the simulator: calls of a scope that disagree, and the order of their accesses.

#include "grid.h"
#include "tilescale_net/device/context.h"
#include "tilescale_net/device/types.h"

namespace tsn::sim {

namespace {
// Of threads under a scheduler: every access is reported.
LocalPages no_pages = [] {
  LocalPages pages{};
  for (LocalPages::Line& line : pages.lines) line.number = ~0ull;
  return pages;
}();

bool equal(const Call& a, const Call& b) {
  return a.operation == b.operation && a.scope == b.scope && a.destination == b.destination && a.source == b.source &&
         a.bytes == b.bytes && a.pe == b.pe && a.signal == b.signal && a.value == b.value && a.add == b.add &&
         a.rows == b.rows && a.pitch == b.pitch && a.source_pitch == b.source_pitch;
}

// How the second call differs from the first, of the same primitive.
std::string difference(const Call& a, const Call& b) {
  const auto pair = [](const char* what, const std::string& x, const std::string& y) {
    return std::string(what) + " " + x + " and " + y;
  };
  const auto address = [](const void* p) { return std::to_string(reinterpret_cast<uintptr_t>(p)); };
  if (a.pe != b.pe) return pair("pe", std::to_string(a.pe), std::to_string(b.pe));
  if (a.bytes != b.bytes) return pair("sizes of", std::to_string(a.bytes), std::to_string(b.bytes)) + " bytes";
  if (a.rows != b.rows) return pair("counts of", std::to_string(a.rows), std::to_string(b.rows)) + " rows";
  if (a.value != b.value) return pair("value", std::to_string(a.value), std::to_string(b.value));
  if (a.destination != b.destination) return pair("destinations at", address(a.destination), address(b.destination));
  if (a.source != b.source) return pair("sources at", address(a.source), address(b.source));
  if (a.pitch != b.pitch || a.source_pitch != b.source_pitch) return "rows at unequal distances";
  return pair("signal words at", address(a.signal), address(b.signal));
}
} // namespace

std::string Grid::call_of(const Fiber& fiber) const {
  return fiber.announced ? latest_call(fiber) : "a barrier that is not part of it";
}

// The running thread meets another one: both must make the same call, or none.
void Grid::compare_calls(const Fiber& other) {
  const Fiber& self = *running_;
  if (&self == &other || (!self.announced && !other.announced)) return;
  if (self.announced && other.announced && equal(self.call, other.call)) return;
  const Fiber& caller = self.announced ? self : other;
  const Fiber& partner = self.announced ? other : self;
  const char* who = caller.call.scope == 1 ? "warp" : "block";
  const std::string threads = concat(" thread ", caller.view.linear, " and thread ", partner.view.linear);
  if (partner.announced && partner.call.operation == caller.call.operation)
    fail(Failure::kernel, call_of(caller) + " is called with unequal arguments by threads of one " + who + ":" +
                              threads + " give " + difference(caller.call, partner.call));
  fail(Failure::kernel, "threads of one " + std::string(who) + " part around a call:" + threads + " are at " +
                            call_of(caller) + " and at " + call_of(partner));
}

std::string Grid::latest_call(const Fiber& fiber) const {
  if (!fiber.call.operation) return "its beginning";
  return primitive_name(fiber.call.operation, fiber.call.scope, launch_.names, fiber.call_line) +
         in_brackets(launch_.lines, fiber.call_line);
}

void Grid::announce(const Call& call) {
  Fiber& self = *running_;
  self.call = call;
  self.call_line = self.view.site;
  self.announced = call.scope != 0;
  self.in_put = false;
}

Actor Grid::actor() const {
  const Thread& view = running_->view;
  return {warp_number(*running_), view.linear_block, view.linear, view.site};
}

void Grid::begin(const Call& call) {
  if (!order_ || !order_->follows_ranks()) note_unfollowed(call);
  if (!order_) return;
  const Actor who = actor();
  running_->put_epoch = call.operation == kOpPutSignal && call.bytes > 0 ? order_->epoch(who.warp) : 0;
  std::string wrong = order_->begin(who, call, running_->view.uses_result);
  restamp();
  if (local_ && wrong.empty()) wrong = copies(call);
  if (race_.empty()) race_ = wrong; // reported at the end: other ranks need the rest of the kernel
}

SharedRange Grid::shared_range() const {
  const Thread& view = running_->view;
  return {reinterpret_cast<uint64_t>(view.dynamic_shared), view.dynamic_shared_bytes};
}

bool Grid::is_shared(const void* p) const {
  const SharedRange range = shared_range();
  if (reinterpret_cast<uint64_t>(p) - range.begin < range.bytes) return true;
  return std::any_of(running_->block->variables.begin(), running_->block->variables.end(), [&](const auto& variable) {
    return reinterpret_cast<uint64_t>(p) - reinterpret_cast<uint64_t>(variable.second.memory.get()) <
           variable.second.bytes;
  });
}

// A copy's accesses to memory of this rank outside of the heap's shadow: a get fills its destination, a put reads its
// source: shared memory during the call, other memory until the put is done.
std::string Grid::copies(const Call& call) {
  const bool puts = call.operation == kOpPut || call.operation == kOpPutSignal;
  if (call.bytes <= 0 || (call.operation != kOpGet && !puts)) return "";
  Thread& view = running_->view;
  const uint32_t warp = warp_number(*running_);
  if (!puts) return local_->copied(view, warp, call, false, 0, shared_range());
  if (order_->in_heap(call.source)) return "";
  if (!is_shared(call.source)) return local_->copied(view, warp, call, true, order_->latest_transfer(), shared_range());
  // By the last thread of the scope, which is the least likely to write there alone afterwards.
  const unsigned last = threads_per_block_ - 1, own = view.linear / 32;
  const bool of_block = call.scope == static_cast<uint32_t>(Scope::block);
  const unsigned thread = of_block ? last : call.scope == 0 ? view.linear : std::min(last, own * 32 + 31);
  Thread& reader = running_->block->threads[thread].view;
  local_->enter(reader, warp - own + thread / 32);
  return local_->copied(reader, warp - own + thread / 32, call, true, 0, shared_range());
}

// A signal of a rank that is not followed may carry everything; to unmapped PEs it goes through the proxy.
void Grid::note_unfollowed(const Call& call) {
  RaceMemory* memory = heap_;
  if (!memory) return;
  for (int pe = 0; pe < memory->ranks(); ++pe) {
    const bool mapped = memory->heaps[pe];
    const bool sends = call.operation == kOpSignal || call.operation == kOpPutSignal;
    if (mapped || !((sends && pe == call.pe) || call.operation == kOpBarrier)) continue;
    Message message{};
    message.word = kAnyWord;
    message.everything = true;
    memory->send(pe, message);
  }
}

bool Grid::signalling(const uint64_t* signal, int pe, uint64_t value, bool add, Message* out) {
  RaceMemory* memory = heap_;
  if (!memory || pe < 0 || pe >= memory->ranks()) return false;
  if (order_ && order_->follows_ranks()) {
    *out = order_->message(warp_number(*running_), running_->view.lane, pe, signal, add, running_->put_epoch);
    running_->put_epoch = 0;
    restamp();
  } else {
    *out = {};
    out->word = memory->offset(signal) / 8;
    out->everything = true;
    out->add = add;
  }
  out->value = value;
  return true;
}

bool Grid::leaves(const void* word, Written written, Message* out) {
  if (!order_ || !heap_) return false;
  if (order_->follows_ranks()) return order_->leaves(warp_number(*running_), running_->view.lane, word, written, out);
  heap_->leave_unknown(word);
  return false;
}

void Grid::accessed(const void* address, uint64_t bytes, bool store, const char* name) {
  if (!order_) return;
  const std::string wrong = order_->accessed(actor(), address, bytes, store, name, race_.empty(), running_->view);
  if (race_.empty()) race_ = wrong;
}

void Grid::viewed(const void* address, uint64_t bytes, bool store, const char* name) {
  if (!order_) return;
  std::string wrong = order_->viewed(actor(), address, bytes, store, name);
  if (race_.empty()) race_ = std::move(wrong);
}

void Grid::local_access(const void* address, uint64_t bytes, LocalAccess access, const char* name, const void* base) {
  if (!local_) return;
  std::string wrong =
      local_->accessed(running_->view, warp_number(*running_), address, bytes, access, name, base, shared_range());
  if (race_.empty()) race_ = std::move(wrong);
}

void Grid::waited(const uint64_t* signal) {
  running_->block->after_wait = launch_.communicates;
  if (!order_) return;
  const Call& call = running_->call;
  const bool known = (call.operation == kOpWait || call.operation == kOpTest) && call.signal == signal;
  const Compare compare = static_cast<Compare>(call.bytes);
  const bool exactly = compare == Compare::eq, above = compare == Compare::gt;
  Seen seen{true, exactly, static_cast<int64_t>(call.value) + above};
  // A kernel that uses the value may depend on it; another one only knows that the wait is over.
  const bool looks = call.operation == kOpWait && running_->view.uses_result;
  if (!known) seen.exactly = false;
  seen.any = !known || looks || !(exactly || above || compare == Compare::ge);
  order_->waited(warp_number(*running_), running_->view.lane, running_->call_line, signal, seen);
  restamp();
}

void Grid::flushed(uint64_t ticket, bool ended) {
  if (!order_) return;
  order_->flushed(warp_number(*running_), running_->view.lane, ticket, ended);
  restamp();
}

void Grid::word(const void* address, uint64_t bytes, WordAccess access, Ordering ordering, Written written) {
  if (scheduler) scheduler->ordered(address, access, ordering);
  if (!order_) return;
  Thread& view = running_->view;
  const bool polls = view.polls && access == WordAccess::read && (bytes == 4 || bytes == 8);
  if (polls) running_->poll = {address, bytes, ordering, 0};
  else view.polls = false;
  const bool late = access == WordAccess::update && !view.uses_result;
  std::string wrong = order_->word(actor(), address, bytes, access, ordering, written, late, polls);
  if (race_.empty()) race_ = std::move(wrong);
  restamp();
}

void Grid::polled(int64_t value, Ends ends) {
  if (!order_) return;
  running_->poll.found = value;
  order_->polled(actor(), running_->poll, ends);
  restamp();
}

void Grid::fenced(uint32_t scope, bool total) {
  if (scheduler) scheduler->fenced(scope, total);
  if (!order_) return;
  order_->fenced(warp_number(*running_), running_->view.lane, static_cast<MemScope>(scope));
  restamp();
}

uint32_t Grid::warp_number(const Fiber& fiber) const {
  return static_cast<uint32_t>(fiber.block->index * ((threads_per_block_ + 31) / 32) + fiber.view.linear / 32);
}

void Grid::meet(const std::vector<Fiber*>& fibers, std::vector<uint32_t> warps) {
  if (!order_) return;
  warps.push_back(warp_number(*running_));
  for (const Fiber* fiber : fibers) {
    const uint32_t warp = warp_number(*fiber);
    if (warp != warps.back()) warps.push_back(warp);
  }
  std::sort(warps.begin(), warps.end());
  warps.erase(std::unique(warps.begin(), warps.end()), warps.end());
  order_->meet(warps);
  if (running_->announced) order_->meets_for(warps, running_->call, running_->call_line);
  restamp();
}

// The running thread's knowledge of the order, for its own stores.
void Grid::restamp() {
  if (scheduler) running_->view.local = &no_pages;
  if (!order_) return;
  Thread& view = running_->view;
  const RaceMemory* memory = heap_;
  if (view.heap_bytes && blocks_ * ((threads_per_block_ + 31) / 32) < kMaxWarps) {
    view.stores = memory->stores(memory->me);
    view.loads = memory->loads(memory->me);
    view.heap_sites = order_->sites();
  }
  view.followed = true;
  view.loads_followed = order_->follows_ranks();
  view.stamp = order_->stamp(warp_number(*running_), view.lane);
  if (local_) local_->enter(view, warp_number(*running_));
  if (scheduler) view.local = &no_pages;
  if (view.loads_followed) memory->peer_range(&view.peers_begin, &view.peers_bytes);
}

// --- barriers and warp operations: where threads of a grid meet -----------------------------------------------------

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
  if (id < 0 || id > 15) fail(Failure::kernel, concat("barrier ", id, " does not exist; there are 16"));
  Barrier& barrier = self.block->barriers[id];
  if (barrier.arrived == 0) barrier.expected = count;
  if (barrier.expected != count)
    fail(Failure::kernel,
         concat("barrier ", id, " is used with ", count, " threads while others wait there for ", barrier.expected));
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
    // No thread can overwrite these before every thread is here again.
    block.vote_result = block.votes;
    block.value = block.next_value;
    block.votes = 0;
  }
  // Within a put, the simulator broadcasts whether it is late, which orders nothing on a GPU.
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
    fail(Failure::kernel,
         concat("a grid barrier needs all ", blocks_, " blocks to be resident, but the simulated GPU holds ",
                launch_.resident_blocks, " (TSN_SIM_SMS sets its size)"));
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
      // A lane outside the mask has no value: hardware returns anything, the simulator all ones.
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
  // Any set of lanes that are here together is right. One time in four the warp has diverged completely; otherwise
  // the others get a chance to arrive first.
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

} // namespace tsn::sim
