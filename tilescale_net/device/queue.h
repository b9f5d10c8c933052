// Pushing descriptors to the proxy, and waiting for its tickets; csrc/proxy/queue.h is the consumer's half.
//
// A push claims a position with one atomic add on the queue's head (device memory), makes sure that the position has
// left the queue's previous lap, and writes the slot with one or two 16-byte stores. It looks for room in a copy of
// the tail in device memory; the tail itself, in host memory and five times as far away, is read only if the queue is
// full by the copy. Lanes of a warp that push to the same queue together claim their positions with one atomic.
//
// Publication: the calling thread's writes, and writes that it has observed before the push (its block's, after a
// barrier), are visible to every reader of the descriptor's data. One fence per push does that (kPublishScope); it
// runs beside the atomic. `publish = false` omits it, for a batch of pushes behind one fence of the caller's own, and
// for descriptors without payload.
//
// All operations to one PE go to one queue, so the proxy sees a PE's operations in one order, whichever thread pushed
// them.
// The caller has checked PEs and addresses; the proxy checks them again. Calls return at once if the job is aborted
// while they wait, and report kQueueTimeout or kFlushTimeout after the deadline.
#pragma once

#include "descriptor.h"
#include "spin.h"

namespace tsn {

// Scope of the fence that publishes payload. A payload lies in this GPU's own heap, the proxy rejects others, and a
// NIC or a copy engine reads it where the fence at GPU scope has put it: in L2, through which all accesses to this
// GPU's memory go. NVSHMEM and DeepEP (ibgda_device.cuh, v1.2.1) order requests in GPU memory before a NIC's doorbell
// in this way. A fence at system scope would also wait for earlier descriptors in host memory, which take longest: on
// an H200 one thread publishes 2.1 M pushes/s with GPU scope and, before it had other savings, 0.51 with system
// scope.
#ifndef TSN_PUBLISH_SCOPE
#define TSN_PUBLISH_SCOPE gpu
#endif
constexpr MemScope kPublishScope = MemScope::TSN_PUBLISH_SCOPE;

namespace detail {

// PE % n_queues.
TSN_DEVICE uint32_t queue_of(const Context* ctx, int pe) {
  const uint64_t share = platform::load_invariant(&ctx->queue_share);
  const uint32_t quotient = uint32_t(uint32_t(pe) * share >> 32);
  return uint32_t(pe) - quotient * platform::load_invariant(&ctx->n_queues);
}

// Without a proxy there are no views: they are read behind the condition that leads here, no earlier.
TSN_DEVICE const QueueView* queue_view(const Context* ctx, uint32_t queue) {
  return reinterpret_cast<const QueueView*>(platform::load_invariant(&ctx->queues)) + queue;
}

// The next position of a queue. The device's own words are at fixed offsets of the heap, so an atomic on them need not
// wait until the queue's view has been read.
TSN_DEVICE uint64_t* queue_head(const Context* ctx, uint32_t queue) {
  return reinterpret_cast<uint64_t*>(platform::load_invariant(&ctx->heap_base)) + kQueueWords +
         int(queue) * kQueueWordsStride;
}

// A push's other data of its queue, loaded at once, while the atomic is in flight.
struct QueuePush {
  uint64_t* tail_cache;
  const uint64_t* tail;
  char* slots;
  uint64_t known_tail;     // the device's copy, which may be stale
  uint64_t known_end;      // the last position known to have room
  uint32_t mask, capacity; // the host's queues have at most 2^31 slots

  TSN_DEVICE QueuePush(const Context* ctx, uint32_t queue, uint64_t* head) : tail_cache(head + kTailCacheWord) {
    const QueueView* view = queue_view(ctx, queue);
    known_tail = platform::load<Order::relaxed, MemScope::sys>(tail_cache);
    slots = reinterpret_cast<char*>(platform::load_invariant_here(&view->slots));
    tail = reinterpret_cast<const uint64_t*>(platform::load_invariant_here(&view->tail));
    mask = uint32_t(platform::load_invariant_here(&view->mask));
  }

  // Keeps computations from later loads: after the atomic, which would otherwise wait for them.
  TSN_DEVICE void pin_loads() {
    slots = platform::opaque(slots);
    mask = platform::opaque(mask);
    capacity = mask + 1;
    known_end = platform::opaque(platform::opaque(known_tail) + mask);
  }

  // Below zero: as far as known here, the queue's previous lap still holds the claimed position.
  TSN_DEVICE int room(uint64_t position) const { return int((known_end - position) >> 32); }
};

// An offset too large for the field becomes the highest one, which no heap holds: the proxy rejects it.
TSN_DEVICE uint64_t queue_offset(const Context* ctx, const void* p) {
  const uint64_t offset = reinterpret_cast<uint64_t>(p) - platform::load_invariant(&ctx->heap_base);
  return offset < kMaxOffset ? offset : kMaxOffset;
}

// Waits until the claimed position has left the queue's previous lap. False: the job is over.
TSN_COLD bool queue_wait_for_room(const Context* ctx, uint64_t* tail_cache, const uint64_t* host_tail, uint32_t mask,
                                  uint64_t position, Operation operation, int pe) {
  uint64_t tail = 0;
  const bool room = spin(
      ctx, [&] { return SpinSubject{operation, pe}; },
      [&] {
        tail = platform::load<Order::acquire, MemScope::sys>(host_tail);
        return position - tail <= mask;
      },
      [&] { fail(ctx, kQueueTimeout, operation, pe, nullptr, position - mask, tail, 0); });
  // Several threads may store here in any order: an older tail only costs another look at the host's.
  if (room) platform::store<Order::relaxed, MemScope::gpu>(tail_cache, tail);
  return room;
}

// Claims positions for all calling lanes with one atomic, and publishes their data while it is in flight.
template <bool publish>
TSN_DEVICE uint64_t queue_claim_together(const Context* ctx, uint64_t* head, uint32_t lanes) {
  const uint32_t self = 1u << platform::lane();
  if (platform::load_invariant(&ctx->n_queues) > 1) {
    lanes = platform::match_lanes(lanes, reinterpret_cast<uint64_t>(head));
  }
  const uint32_t leader = lanes & (0u - lanes);
  uint64_t p = 0;
  if (self == leader) {
    p = platform::atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(head, uint64_t(platform::popcount(lanes)));
  }
  if (publish) platform::fence<kPublishScope>();
  return platform::shuffle(lanes, p, int(platform::popcount(leader - 1))) + platform::popcount(lanes & (self - 1));
}

// Writes a descriptor that was encoded with parity 0, unless `room` is below zero.
TSN_DEVICE void queue_store(const QueuePush& push, uint64_t position, Command command, Descriptor d, int room = 0) {
  const uint64_t parity = (uint32_t(position) & push.capacity) == 0; // parity_of(), in half the instructions
  d.word[0] |= parity, d.word[2] |= parity;
  Vec16* slot = reinterpret_cast<Vec16*>(push.slots + uint64_t(uint32_t(position) & push.mask) * sizeof(Descriptor));
  auto half = [&](int i) -> Vec16 {
    const uint64_t a = d.word[2 * i], b = d.word[2 * i + 1];
    return {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
  };
  if (has_second_half(command)) platform::store_16b_below(slot + 1, half(1), -1, room);
  platform::store_16b_below(slot, half(0), -1, room);
}

// Fills a claimed position; returns its ticket, 0 when the job is over.
TSN_DEVICE uint64_t queue_fill(const Context* ctx, QueuePush& push, uint32_t queue, uint64_t position,
                               Operation operation, const Request& request, const Descriptor& d) {
  push.pin_loads();
  // Usually there is room, and the stores do not wait for a branch.
  const int room = push.room(position);
  queue_store(push, position, request.command, d, room);
  if (TSN_UNLIKELY(room < 0)) {
    if (!queue_wait_for_room(ctx, push.tail_cache, push.tail, push.mask, position, operation, int(request.pe)))
      return 0;
    queue_store(push, position, request.command, d);
  }
  return make_ticket(queue, position);
}

// The descriptor, built where this is called: while the atomic is in flight, not before it leaves.
TSN_DEVICE Descriptor describe(Request r) {
  r.pe = platform::opaque(r.pe);
  if (has_second_half(r.command)) r.second = platform::opaque(r.second), r.bytes = platform::opaque(r.bytes);
  Descriptor d = encode(r, 0);
  for (uint64_t& word : d.word) word = platform::opaque(word);
  return d;
}

TSN_DEVICE bool single_lane(uint32_t lanes) { return lanes == 1u << platform::lane(); }

// A push by the only lane that calls.
template <bool publish>
TSN_DEVICE uint64_t queue_push_single_lane(const Context* ctx, uint32_t queue, Operation operation,
                                           const Request& request, uint32_t lanes) {
  uint64_t* head = queue_head(ctx, queue);
  // Adds 1, but not as a constant: the assembler would turn that into a warp-wide atomic, whose shuffles would wait
  // for the answer before later work begins.
  const uint64_t one = lanes >> platform::lane();
  uint64_t position = platform::atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(head, one);
  QueuePush push(ctx, queue, head);
  const Descriptor d = describe(request);
  if (publish) {
    platform::fence<kPublishScope>();
    // Adds 0: this lane is active, but that is unknown before the fence. Otherwise the assembler would compute with
    // the position, and wait for it, ahead of the fence.
    position += platform::popcount(platform::active_lanes() & lanes) - 1;
  }
  return queue_fill(ctx, push, queue, position, operation, request, d);
}

// A push by all calling lanes, each its own descriptor.
template <bool publish>
TSN_DEVICE uint64_t queue_push_together(const Context* ctx, uint32_t queue, Operation operation, const Request& request,
                                        uint32_t lanes) {
  uint64_t* head = queue_head(ctx, queue);
  QueuePush push(ctx, queue, head);
  const Descriptor d = describe(request);
  const uint64_t position = queue_claim_together<publish>(ctx, head, lanes);
  return queue_fill(ctx, push, queue, position, operation, request, d);
}

// Pushes one descriptor per calling lane; returns its ticket, 0 when the job is over.
template <bool publish>
TSN_DEVICE uint64_t queue_push(const Context* ctx, uint32_t queue, Operation operation, const Request& request) {
  const uint32_t lanes = platform::active_lanes();
  if (TSN_LIKELY(single_lane(lanes))) return queue_push_single_lane<publish>(ctx, queue, operation, request, lanes);
  return queue_push_together<publish>(ctx, queue, operation, request, lanes);
}
// The same without a fence and out of line, of a descriptor with parity 0: for pushes that are rare.
TSN_COLD void queue_push_apart(const Context* ctx, uint32_t queue, Operation operation, Command command, uint32_t pe,
                               Descriptor d) {
  uint64_t* head = queue_head(ctx, queue);
  QueuePush push(ctx, queue, head);
  const uint64_t position = queue_claim_together<false>(ctx, head, platform::active_lanes());
  queue_fill(ctx, push, queue, position, operation, {command, pe}, d);
}
TSN_DEVICE void queue_push_apart(const Context* ctx, uint32_t queue, Operation operation, const Request& r) {
  queue_push_apart(ctx, queue, operation, r.command, r.pe, encode(r, 0));
}

} // namespace detail

// The fence of a batch: pushes with publish = false after it publish everything from before it.
TSN_DEVICE void queue_publish() { platform::fence<kPublishScope>(); }

namespace detail {

// The word that shows the completion of the ticket's operation.
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
      ctx, [&] { return SpinSubject{operation, pe}; }, [&] { return detail::queue_test(done, ticket); },
      [&] { fail(ctx, kFlushTimeout, operation, pe, nullptr, ticket & kTicketPositionMask, 0, 0); });
}

} // namespace tsn
