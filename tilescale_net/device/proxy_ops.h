// Operations through the proxy: puts, gets, signals, fences and flushes as descriptors in a device queue.
//
// The caller has checked PEs and addresses; the proxy checks them again. Calls return at once if the job is aborted
// while they wait, and report kQueueTimeout or kFlushTimeout after the deadline. `publish = false` omits the fence
// that publishes payload, see queue.h.
#pragma once

#include "queue.h"

namespace tsn {

namespace detail {

// Data that fit the descriptor save the proxy's copy out of GPU memory, the longest step.
// The size if they do: one naturally aligned machine word of the heap; else 0.
TSN_DEVICE int inline_bytes(const Context* ctx, const void* dst, const void* src, int64_t bytes) {
  if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) return 0;
  const uint64_t offset = reinterpret_cast<uint64_t>(src) - platform::load_invariant(&ctx->heap_base);
  const bool inside = offset < platform::load_invariant(&ctx->heap_bytes); // else the proxy rejects it
  const uint64_t bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);
  return inside && (bits & uint64_t(bytes - 1)) == 0 ? int(bytes) : 0;
}
TSN_DEVICE uint64_t inline_data(const void* src, int bytes) {
  if (bytes == 1) return platform::load_data(static_cast<const uint8_t*>(src));
  if (bytes == 2) return platform::load_data(static_cast<const uint16_t*>(src));
  if (bytes == 4) return platform::load_data(static_cast<const uint32_t*>(src));
  return platform::load_data(static_cast<const uint64_t*>(src));
}

} // namespace detail

// Writes the low `bytes` (1, 2, 4 or 8) bytes of `value` to `dst`, naturally aligned, on the PE. The value travels in
// the descriptor.
template <bool publish = true>
TSN_DEVICE void queue_put_value(const Context* ctx, void* dst, uint64_t value, int bytes, int pe) {
  Request r = {sized(Command::put_value_1, bytes), uint32_t(pe), detail::queue_offset(ctx, dst)};
  r.data = value;
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPutValue, r);
}

namespace detail {

// Empty puts, puts that fit their descriptor, and puts that need more than one.
template <bool publish>
TSN_COLD void queue_put_inline_or_split(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  const int small = inline_bytes(ctx, dst, src, bytes);
  if (small) return queue_put_value<publish>(ctx, dst, inline_data(src, small), small, pe);
  Request r = {Command::put, uint32_t(pe), queue_offset(ctx, dst), queue_offset(ctx, src)};
  const uint32_t queue = queue_of(ctx, pe);
  if (publish && bytes != 0) platform::fence<kPublishScope>();
  TSN_ROLLED
  for (uint64_t left = uint64_t(bytes); left > 0; left -= r.bytes, r.first += r.bytes, r.second += r.bytes) {
    r.bytes = left < kMaxDescriptorBytes ? left : kMaxDescriptorBytes;
    queue_push_apart(ctx, queue, kOpPut, r);
  }
}

} // namespace detail

// Copies `bytes` bytes from local `src` to the PE's `dst`.
template <bool publish = true>
TSN_DEVICE void queue_put(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  constexpr uint64_t kLeast = 9; // sizes that may not fit a descriptor
  const bool plain = uint64_t(bytes) - kLeast <= kMaxDescriptorBytes - kLeast;
  Request r = {Command::put, uint32_t(pe), detail::queue_offset(ctx, dst), detail::queue_offset(ctx, src),
               uint64_t(bytes)};
  if (TSN_LIKELY(plain)) detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPut, r);
  else detail::queue_put_inline_or_split<publish>(ctx, dst, src, bytes, pe);
}

// Earlier operations to the PE come before later signals to it. pe = -1: to any PE.
TSN_COLD void queue_fence(const Context* ctx, int pe) {
  const uint32_t n = platform::load_invariant(&ctx->n_queues);
  const uint32_t first = pe < 0 ? 0 : detail::queue_of(ctx, pe), end = pe < 0 ? n : first + 1;
  const Request r = {Command::fence, pe < 0 ? kAllPes : uint32_t(pe)};
  TSN_ROLLED
  for (uint32_t queue = first; queue < end; queue++) detail::queue_push_apart(ctx, queue, kOpFence, r);
}

// Sets, or adds to, the signal word at `sig` on the PE.
template <bool publish = true>
TSN_DEVICE void queue_signal(const Context* ctx, uint64_t* sig, uint64_t value, int pe, SignalOp op) {
  const Command command = op == SignalOp::set ? Command::signal_set : Command::signal_add;
  Request r = {command, uint32_t(pe), detail::queue_offset(ctx, sig)};
  r.value = value;
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpSignal, r);
}

namespace detail {

// All of a put_signal except its last descriptor: a fence orders it before the signal. Returns its bytes.
template <bool publish>
TSN_COLD uint64_t queue_put_head(const Context* ctx, void* dst, const void* src, uint64_t bytes, int pe) {
  const uint64_t head = (bytes - 1) / kMaxDescriptorBytes * kMaxDescriptorBytes;
  queue_put_inline_or_split<publish>(ctx, dst, src, int64_t(head), pe);
  queue_fence(ctx, pe);
  return head;
}
template <bool publish>
TSN_COLD void queue_signal_alone(const Context* ctx, uint64_t* sig, uint64_t value, int pe, SignalOp op) {
  const Command command = op == SignalOp::set ? Command::signal_set : Command::signal_add;
  Request r = {command, uint32_t(pe), queue_offset(ctx, sig)};
  r.value = value;
  if (publish) platform::fence<kPublishScope>();
  queue_push_apart(ctx, queue_of(ctx, pe), kOpSignal, r);
}

} // namespace detail

// A put, and once its data is in place at the PE, a signal.
template <bool publish = true>
TSN_DEVICE void queue_put_signal(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                                 uint64_t value, SignalOp op) {
  if (TSN_UNLIKELY(bytes <= 0)) return detail::queue_signal_alone<publish>(ctx, sig, value, pe, op);
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
  if (TSN_UNLIKELY(r.bytes > kMaxDescriptorBytes)) {
    const uint64_t head = detail::queue_put_head<publish>(ctx, dst, src, r.bytes, pe);
    r.first += head;
    r.second += head;
    r.bytes -= head;
  }
  detail::queue_push<publish>(ctx, detail::queue_of(ctx, pe), kOpPutSignal, r);
}

// A ticket for the completion, at the targets, of all earlier pushes: to the PE, or with pe = -1 to all.
TSN_COLD uint64_t queue_flush(const Context* ctx, int pe) {
  const uint32_t n = platform::load_invariant(&ctx->n_queues);
  Request r = {Command::flush, pe < 0 ? kAllPes : uint32_t(pe)};
  if (pe >= 0 || n == 1) return detail::queue_push<false>(ctx, pe < 0 ? 0 : detail::queue_of(ctx, pe), kOpFlush, r);
  // One share per queue, all naming the ticket of queue 0, whose position must therefore be claimed first.
  uint64_t* head = detail::queue_head(ctx, 0);
  detail::QueuePush push(ctx, 0, head);
  const uint64_t position = detail::queue_claim_together<false>(ctx, head, platform::active_lanes());
  push.pin_loads();
  if (TSN_UNLIKELY(push.room(position) < 0))
    if (!detail::queue_wait_for_room(ctx, push.tail_cache, push.tail, push.mask, position, kOpFlush, pe)) return 0;
  r.command = Command::flush_part;
  r.value = make_ticket(0, position);
  TSN_ROLLED
  for (uint32_t queue = 1; queue < n; queue++) detail::queue_push_apart(ctx, queue, kOpFlush, r);
  detail::queue_store(push, position, r.command, encode(r, 0));
  return r.value;
}

// Copies `bytes` bytes from the PE's `src` to local `dst`; the ticket completes when they have arrived.
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

} // namespace tsn
