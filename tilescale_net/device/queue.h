// Pushing descriptors to the proxy, and waiting for its tickets; csrc/proxy/queue.h is the consumer's half.
//
// A push claims a position with one atomic add on the queue's head (device memory), makes sure that the position has
// left the ring's previous lap, and writes the slot with one or two 16-byte stores. Whether there is room is asked of a
// copy of the tail in device memory; the tail itself, in host memory and so five times as far away, only when the copy
// says "full". Lanes of a warp that push to the same queue together claim their positions with one atomic.
//
// Publication: what the calling thread wrote or has observed before the push (its block's writes, after a barrier) is
// visible to whoever reads what the descriptor names. One fence per push does that (kPublishScope); it runs beside the
// atomic. `publish = false` leaves it out, for a batch of pushes behind one fence of the caller's own, and for
// descriptors without payload.
//
// All operations to one PE go to one queue, so the proxy sees a PE's operations in one order whoever pushed them.
// PEs and addresses have been checked by the caller; the proxy checks them again. Calls return at once when the job is
// aborted while they wait, and report kQueueTimeout or kFlushTimeout when the deadline passes.
#pragma once

#include "descriptor.h"
#include "spin.h"

namespace tsn {

// Scope of the fence that publishes payload. A payload lies in this GPU's own heap, the proxy refuses others, and a NIC
// or a copy engine reads it where the fence at GPU scope has put it: in L2, through which all accesses to this GPU's
// memory go. NVSHMEM and DeepEP (ibgda_device.cuh, v1.2.1) order requests in GPU memory before a NIC's doorbell like
// this. A fence at system scope would also wait for the descriptors that went to host memory before, which take
// longest: on an H200 one thread publishes 2.1 M pushes/s with this one and, before it had other savings, 0.51 with
// that.
#ifndef TSN_PUBLISH_SCOPE
#define TSN_PUBLISH_SCOPE gpu
#endif
constexpr MemScope kPublishScope = MemScope::TSN_PUBLISH_SCOPE;

namespace detail {

TSN_DEVICE uint32_t popcount(uint32_t v) {
#ifdef __CUDA_ARCH__
  return uint32_t(__popc(v));
#else
  return uint32_t(__builtin_popcount(v));
#endif
}

// PE % n_queues.
TSN_DEVICE uint32_t queue_of(const Context* ctx, int pe) {
  const uint64_t share = platform::load_invariant(&ctx->queue_share);
  const uint32_t quotient = uint32_t(uint32_t(pe) * share >> 32);
  return uint32_t(pe) - quotient * platform::load_invariant(&ctx->n_queues);
}

// Where there is no proxy there are no views either: they are read behind the condition that leads here, no earlier.
TSN_DEVICE const QueueView* queue_view(const Context* ctx, uint32_t queue) {
  return reinterpret_cast<const QueueView*>(platform::load_invariant(&ctx->queues)) + queue;
}

// The next position of a queue. The device's own words lie at fixed places of the heap, so an atomic on them need not
// wait until the queue's view has been read.
TSN_DEVICE uint64_t* queue_head(const Context* ctx, uint32_t queue) {
  return reinterpret_cast<uint64_t*>(platform::load_invariant(&ctx->heap_base)) + kQueueWords +
         int(queue) * kQueueWordsStride;
}

// What else a push needs of its queue, loaded at once, while the atomic is on its way.
struct Port {
  uint64_t* tail_cache;
  const uint64_t* tail;
  char* slots;
  uint64_t known_tail;     // the device's copy, which may be old
  uint64_t known_end;      // the last position that has room for all that is known here
  uint32_t mask, capacity; // the host's queues have at most 2^31 slots

  TSN_DEVICE Port(const Context* ctx, uint32_t queue, uint64_t* head) : tail_cache(head + kTailCacheWord) {
    const QueueView* view = queue_view(ctx, queue);
    known_tail = platform::load<Order::relaxed, MemScope::sys>(tail_cache);
    slots = reinterpret_cast<char*>(platform::load_invariant_here(&view->slots));
    tail = reinterpret_cast<const uint64_t*>(platform::load_invariant_here(&view->tail));
    mask = uint32_t(platform::load_invariant_here(&view->mask));
  }

  // Keeps what is computed from the loads behind this place: after the atomic, which would wait for them otherwise.
  TSN_DEVICE void settle() {
    slots = platform::opaque(slots);
    mask = platform::opaque(mask);
    capacity = mask + 1;
    known_end = platform::opaque(platform::opaque(known_tail) + mask);
  }

  // Below zero: for all that is known here, the claimed position is still taken by the ring's previous lap.
  TSN_DEVICE int room(uint64_t position) const { return int((known_end - position) >> 32); }
};

// What does not fit the field becomes the highest offset, which no heap holds: the proxy refuses it.
TSN_DEVICE uint64_t queue_offset(const Context* ctx, const void* p) {
  const uint64_t offset = reinterpret_cast<uint64_t>(p) - platform::load_invariant(&ctx->heap_base);
  return offset < kMaxOffset ? offset : kMaxOffset;
}

// Waits until the claimed position has left the ring's previous lap. False: the job is over.
TSN_COLD bool queue_wait_for_room(const Context* ctx, uint64_t* tail_cache, const uint64_t* host_tail, uint32_t mask,
                                  uint64_t position, Operation operation, int pe) {
  uint64_t tail = 0;
  const bool room = spin(
      ctx,
      [&] {
        tail = platform::load<Order::acquire, MemScope::sys>(host_tail);
        return position - tail <= mask;
      },
      [&] { fail(ctx, kQueueTimeout, operation, pe, nullptr, position - mask, tail, 0); });
  // Several threads may store here in any order: an older tail only costs another look at the host's.
  if (room) platform::store<Order::relaxed, MemScope::gpu>(tail_cache, tail);
  return room;
}

// Claims positions for all calling lanes with one atomic. What they publish is published while it is on its way.
template <bool publish>
TSN_DEVICE uint64_t queue_claim_together(const Context* ctx, uint64_t* head, uint32_t lanes) {
  const uint32_t self = 1u << platform::lane();
  if (platform::load_invariant(&ctx->n_queues) > 1) {
    lanes = platform::match_lanes(lanes, reinterpret_cast<uint64_t>(head));
  }
  const uint32_t leader = lanes & (0u - lanes);
  uint64_t p = 0;
  if (self == leader) {
    p = platform::atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(head, uint64_t(popcount(lanes)));
  }
  if (publish) platform::fence<kPublishScope>();
  return platform::shuffle(lanes, p, int(popcount(leader - 1))) + popcount(lanes & (self - 1));
}

// Writes a descriptor that was encoded with parity 0, unless `room` is below zero.
TSN_DEVICE void queue_store(const Port& port, uint64_t position, Command command, Descriptor d, int room = 0) {
  const uint64_t parity = (uint32_t(position) & port.capacity) == 0; // parity_of(), in half the instructions
  d.word[0] |= parity, d.word[2] |= parity;
  Vec16* slot = reinterpret_cast<Vec16*>(port.slots + uint64_t(uint32_t(position) & port.mask) * sizeof(Descriptor));
  auto half = [&](int i) -> Vec16 {
    const uint64_t a = d.word[2 * i], b = d.word[2 * i + 1];
    return {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
  };
  if (has_second_half(command)) platform::store_16b_below(slot + 1, half(1), -1, room);
  platform::store_16b_below(slot, half(0), -1, room);
}

// Data that fit the descriptor itself spare the proxy a copy out of GPU memory, which takes longer than all the rest.
// The size if they do: one naturally aligned machine word of the heap; else 0.
TSN_DEVICE int inline_bytes(const Context* ctx, const void* dst, const void* src, int64_t bytes) {
  if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) return 0;
  const uint64_t offset = reinterpret_cast<uint64_t>(src) - platform::load_invariant(&ctx->heap_base);
  const bool inside = offset < platform::load_invariant(&ctx->heap_bytes); // else the proxy is to refuse it
  const uint64_t bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);
  return inside && (bits & uint64_t(bytes - 1)) == 0 ? int(bytes) : 0;
}
TSN_DEVICE uint64_t inline_data(const void* src, int bytes) {
  if (bytes == 1) return platform::load_data(static_cast<const uint8_t*>(src));
  if (bytes == 2) return platform::load_data(static_cast<const uint16_t*>(src));
  if (bytes == 4) return platform::load_data(static_cast<const uint32_t*>(src));
  return platform::load_data(static_cast<const uint64_t*>(src));
}

// Fills a claimed position; returns its ticket, 0 when the job is over.
TSN_DEVICE uint64_t queue_fill(const Context* ctx, Port& port, uint32_t queue, uint64_t position, Operation operation,
                               const Request& request, const Descriptor& d) {
  port.settle();
  // As a rule there is room, and the stores do not wait for a branch.
  const int room = port.room(position);
  queue_store(port, position, request.command, d, room);
  if (TSN_UNLIKELY(room < 0)) {
    if (!queue_wait_for_room(ctx, port.tail_cache, port.tail, port.mask, position, operation, int(request.pe)))
      return 0;
    queue_store(port, position, request.command, d);
  }
  return make_ticket(queue, position);
}

// The descriptor, put together where this is called: while the atomic is on its way, not before it leaves.
TSN_DEVICE Descriptor describe(Request r) {
  r.pe = platform::opaque(r.pe);
  if (has_second_half(r.command)) r.second = platform::opaque(r.second), r.bytes = platform::opaque(r.bytes);
  Descriptor d = encode(r, 0);
  for (uint64_t& word : d.word) word = platform::opaque(word);
  return d;
}

TSN_DEVICE bool alone(uint32_t lanes) { return lanes == 1u << platform::lane(); }

// A push by the only lane that calls.
template <bool publish>
TSN_DEVICE uint64_t queue_push_alone(const Context* ctx, uint32_t queue, Operation operation, const Request& request,
                                     uint32_t lanes) {
  uint64_t* head = queue_head(ctx, queue);
  // Adds 1, but not as a constant: the assembler would turn that into an atomic of the whole warp, and its shuffles
  // would wait for the answer before what follows begins.
  const uint64_t one = lanes >> platform::lane();
  uint64_t position = platform::atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(head, one);
  Port port(ctx, queue, head);
  const Descriptor d = describe(request);
  if (publish) {
    platform::fence<kPublishScope>();
    // Adds 0, this lane is active, but that is not known before the fence: else the assembler would compute with the
    // position, and wait for it, ahead of the fence.
    position += popcount(platform::active_lanes() & lanes) - 1;
  }
  return queue_fill(ctx, port, queue, position, operation, request, d);
}

// A push by all calling lanes, each its own descriptor.
template <bool publish>
TSN_DEVICE uint64_t queue_push_together(const Context* ctx, uint32_t queue, Operation operation, const Request& request,
                                        uint32_t lanes) {
  uint64_t* head = queue_head(ctx, queue);
  Port port(ctx, queue, head);
  const Descriptor d = describe(request);
  const uint64_t position = queue_claim_together<publish>(ctx, head, lanes);
  return queue_fill(ctx, port, queue, position, operation, request, d);
}

// Pushes one descriptor per calling lane; returns its ticket, 0 when the job is over.
template <bool publish>
TSN_DEVICE uint64_t queue_push(const Context* ctx, uint32_t queue, Operation operation, const Request& request) {
  const uint32_t lanes = platform::active_lanes();
  if (TSN_LIKELY(alone(lanes))) return queue_push_alone<publish>(ctx, queue, operation, request, lanes);
  return queue_push_together<publish>(ctx, queue, operation, request, lanes);
}

} // namespace detail

// The fence of a batch: pushes with publish = false after it publish everything from before it.
TSN_DEVICE void queue_publish() { platform::fence<kPublishScope>(); }

// Writes the low `bytes` (1, 2, 4 or 8) bytes of `value` to `dst`, naturally aligned, on the PE. The value travels in
// the descriptor.
template <bool publish = true>
TSN_DEVICE void queue_put_value(const Context* ctx, void* dst, uint64_t value, int bytes, int pe) {
  Request r = {sized(Command::put_value_1, bytes), uint32_t(pe), detail::queue_offset(ctx, dst)};
  r.data = value;
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPutValue, r);
}

namespace detail {

// Puts that are none, that fit their descriptor, or that need more than one.
template <bool publish>
TSN_COLD void queue_put_odd(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  const int small = inline_bytes(ctx, dst, src, bytes);
  if (small) return queue_put_value<publish>(ctx, dst, inline_data(src, small), small, pe);
  Request r = {Command::put, uint32_t(pe), queue_offset(ctx, dst), queue_offset(ctx, src)};
  const uint32_t queue = queue_of(ctx, pe);
  if (publish && bytes != 0) platform::fence<kPublishScope>();
  for (uint64_t left = uint64_t(bytes); left > 0; left -= r.bytes, r.first += r.bytes, r.second += r.bytes) {
    r.bytes = left < kMaxDescriptorBytes ? left : kMaxDescriptorBytes;
    queue_push<false>(ctx, queue, kOpPut, r);
  }
}

} // namespace detail

// Copies `bytes` bytes from local `src` to where `dst` lies on the PE.
template <bool publish = true>
TSN_DEVICE void queue_put(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  constexpr uint64_t kLeast = 9; // what may not fit a descriptor
  const bool plain = uint64_t(bytes) - kLeast <= kMaxDescriptorBytes - kLeast;
  Request r = {Command::put, uint32_t(pe), detail::queue_offset(ctx, dst), detail::queue_offset(ctx, src),
               uint64_t(bytes)};
  if (TSN_LIKELY(plain)) detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPut, r);
  else detail::queue_put_odd<publish>(ctx, dst, src, bytes, pe);
}

// Earlier operations to the PE come before later signals to it. pe = -1: to any PE.
TSN_DEVICE void queue_fence(const Context* ctx, int pe) {
  const uint32_t n = platform::load_invariant(&ctx->n_queues);
  const uint32_t first = pe < 0 ? 0 : detail::queue_of(ctx, pe), end = pe < 0 ? n : first + 1;
  const Request r = {Command::fence, pe < 0 ? kAllPes : uint32_t(pe)};
  for (uint32_t queue = first; queue < end; queue++) detail::queue_push<false>(ctx, queue, kOpFence, r);
}

// Sets, or adds to, the signal word at `sig` on the PE.
template <bool publish = true>
TSN_DEVICE void queue_signal(const Context* ctx, uint64_t* sig, uint64_t value, int pe, SignalOp op) {
  const Command command = op == SignalOp::set ? Command::signal_set : Command::signal_add;
  Request r = {command, uint32_t(pe), detail::queue_offset(ctx, sig)};
  r.value = value;
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpSignal, r);
}

// A put, and once its data is in place at the PE, a signal.
template <bool publish = true>
TSN_DEVICE void queue_put_signal(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                                 uint64_t value, SignalOp op) {
  if (bytes <= 0) return queue_signal<publish>(ctx, sig, value, pe, op);
  const Command command = op == SignalOp::set ? Command::put_signal_set : Command::put_signal_add;
  Request r = {command, uint32_t(pe), detail::queue_offset(ctx, dst), detail::queue_offset(ctx, src)};
  r.bytes = uint64_t(bytes);
  r.signal = detail::queue_offset(ctx, sig);
  r.value = value;
  const int small = detail::inline_bytes(ctx, dst, src, bytes);
  if (small) {
    r.command = sized(op == SignalOp::set ? Command::put_value_signal_set_1 : Command::put_value_signal_add_1, small);
    r.data = detail::inline_data(src, small);
  }
  if (r.bytes > kMaxDescriptorBytes) {
    // All but the last part travel as plain puts; a fence brings them before the signal.
    const uint64_t head = (r.bytes - 1) / kMaxDescriptorBytes * kMaxDescriptorBytes;
    queue_put<publish>(ctx, dst, src, int64_t(head), pe);
    queue_fence(ctx, pe);
    r.first += head;
    r.second += head;
    r.bytes -= head;
  }
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPutSignal, r);
}

// A ticket for the completion, at the targets, of everything pushed before: to the PE, or with pe = -1 to all.
TSN_DEVICE uint64_t queue_flush(const Context* ctx, int pe) {
  const uint32_t n = platform::load_invariant(&ctx->n_queues);
  Request r = {Command::flush, pe < 0 ? kAllPes : uint32_t(pe)};
  if (pe >= 0) return detail::queue_push<false>(ctx, detail::queue_of(ctx, pe), kOpFlush, r);
  if (n == 1) return detail::queue_push<false>(ctx, 0, kOpFlush, r);
  // One share per queue, all naming the ticket of queue 0, whose position must therefore be claimed first.
  uint64_t* head = detail::queue_head(ctx, 0);
  detail::Port port(ctx, 0, head);
  const uint64_t position = detail::queue_claim_together<false>(ctx, head, platform::active_lanes());
  port.settle();
  if (TSN_UNLIKELY(port.room(position) < 0))
    if (!detail::queue_wait_for_room(ctx, port.tail_cache, port.tail, port.mask, position, kOpFlush, pe)) return 0;
  r.command = Command::flush_part;
  r.value = make_ticket(0, position);
  for (uint32_t queue = 1; queue < n; queue++) detail::queue_push<false>(ctx, queue, kOpFlush, r);
  detail::queue_store(port, position, r.command, encode(r, 0));
  return r.value;
}

// Copies `bytes` bytes from where `src` lies on the PE to local `dst`; the ticket tells when they are there.
template <bool publish = true>
TSN_DEVICE uint64_t queue_get(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  Request r = {Command::get, uint32_t(pe), detail::queue_offset(ctx, dst), detail::queue_offset(ctx, src)};
  const uint32_t queue = detail::queue_of(ctx, pe);
  uint64_t ticket = 0;
  bool fence = publish;
  uint64_t left = uint64_t(bytes);
  do {
    r.bytes = left < kMaxDescriptorBytes ? left : kMaxDescriptorBytes;
    ticket = fence ? detail::queue_push<true>(ctx, queue, kOpGet, r) : detail::queue_push<false>(ctx, queue, kOpGet, r);
    fence = false;
    r.first += r.bytes;
    r.second += r.bytes;
    left -= r.bytes;
  } while (left > 0);
  // Parts finish in any order; a flush covers them all.
  return uint64_t(bytes) > kMaxDescriptorBytes ? queue_flush(ctx, pe) : ticket;
}

namespace detail {

// The word that tells when the operation of the ticket is complete.
TSN_DEVICE const uint64_t* queue_done(const Context* ctx, uint64_t ticket) {
  const QueueView* q = queue_view(ctx, ticket_queue(ticket));
  const uint64_t slot = (ticket & kTicketPositionMask) & platform::load_invariant_here(&q->mask);
  return reinterpret_cast<const uint64_t*>(platform::load_invariant_here(&q->done)) + slot;
}

TSN_DEVICE bool queue_test(const uint64_t* done, uint64_t ticket) {
  return ticket_done(ticket, platform::load<Order::acquire, MemScope::sys>(done));
}

} // namespace detail

// Whether the operation of the ticket is complete.
TSN_DEVICE bool queue_test(const Context* ctx, uint64_t ticket) {
  return detail::queue_test(detail::queue_done(ctx, ticket), ticket);
}

// Waits for it. False when the job was aborted or the deadline passed, which is reported as `operation`.
TSN_DEVICE bool queue_wait(const Context* ctx, uint64_t ticket, Operation operation, int pe = -1) {
  const uint64_t* done = detail::queue_done(ctx, ticket); // once: polls should follow one another at once
  return spin(
      ctx, [&] { return detail::queue_test(done, ticket); },
      [&] { fail(ctx, kFlushTimeout, operation, pe, nullptr, ticket & kTicketPositionMask, 0, 0); });
}

} // namespace tsn
