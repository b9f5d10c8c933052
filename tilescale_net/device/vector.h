// Vectors of 16 bytes that carry their own arrival: a receiver polls the data, so no flag travels with them and no
// fence stands between data and flag (the protocol that TensorRT-LLM calls Lamport).
//
// A 32-bit word that is 0 in memory has not arrived. A word travels with its top bit flipped, so only -0.0 would be
// 0; it travels as the word of ones, which is a NaN in float32 and twice one in 16-bit formats, and a word of ones as
// its neighbour, another NaN. Each word shows its own arrival, so a vector need not arrive as a whole.
#pragma once

#include "atomic.h"

namespace tsn {
namespace detail {

constexpr uint32_t kTopBit = 0x80000000u, kOnes = 0xffffffffu;

TSN_DEVICE uint32_t word_to_send(uint32_t w) {
  if (w == kOnes) w = kOnes - 1;
  if (w == kTopBit) w = kOnes;
  return w ^ kTopBit;
}
TSN_DEVICE uint32_t word_received(uint32_t w) {
  w ^= kTopBit;
  return w == kOnes ? kTopBit : w;
}

TSN_DEVICE bool has_arrived(Vec16 v) { return (v.x != 0) & (v.y != 0) & (v.z != 0) & (v.w != 0); }

// The simulator moves word by word, with other threads between them.
TSN_DEVICE Vec16 load_words(const Vec16* p) {
  if constexpr (!platform::kDefersRemoteWrites) return platform::load_data(p);
  constexpr auto load = ld<Order::relaxed, MemScope::sys, uint32_t>;
  return {load(&p->x), load(&p->y), load(&p->z), load(&p->w)};
}
TSN_DEVICE void store_words(Vec16* p, Vec16 v) {
  if constexpr (!platform::kDefersRemoteWrites) return platform::store_data(p, v);
  constexpr auto store = st<Order::relaxed, MemScope::sys, uint32_t>;
  store(&p->w, v.w), store(&p->z, v.z), store(&p->y, v.y), store(&p->x, v.x);
}

// Reports why vectors cannot be put to all of the PEs; nothing in an aborted job.
TSN_COLD void report_puts(const Context* ctx, void* dst, int64_t bytes, int pes) {
  for (int pe = 0; pe < pes; pe++) {
    const PeerAccess access(ctx, pe);
    if (!access.validate<Scope::thread>(kOpPut, dst, bytes) || access.aborted) return;
    if (!access.direct()) return fail(ctx, kNotDirect, kOpPut, pe, dst, 0, 0, uint64_t(bytes));
  }
}

} // namespace detail

// Writes 16 bytes of registers to the PE's `dst`, given by its local address. Called by one thread. A PE that is not
// mapped is an error.
TSN_DEVICE void put_vector(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  const PeerAccess access(ctx, pe);
  if (TSN_UNLIKELY(!access.validate<Scope::thread>(kOpPut, dst, bytes) || access.aborted)) return;
  if (TSN_UNLIKELY(!access.direct())) return fail(ctx, kNotDirect, kOpPut, pe, dst, 0, 0, uint64_t(bytes));
  Vec16 v;
  memcpy(&v, src, sizeof v);
  Vec16* peer = (Vec16*)access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites) platform::expect_empty(peer);
  using detail::word_to_send;
  detail::store_words(peer, {word_to_send(v.x), word_to_send(v.y), word_to_send(v.z), word_to_send(v.w)});
}

// Writes vectors to PEs first, first + 1, … of Pes, wrapping to 0, each to its `dst`: the only one of `src`, or one
// after the other of Pes. All context fields are loaded before the first is sent and shared by later calls, at
// addresses that depend on nothing: with one put per PE, each would wait for its loads behind the check of the
// previous one. `first` is one of the Pes. Called by one thread.
template <int Pes, int Rows>
TSN_DEVICE void put_vectors(const Context* ctx, void* dst, const void* src, int64_t bytes, int first) {
  static_assert(Rows == 1 || Rows == Pes, "one vector for all PEs, or one for each");
  static_assert(Pes <= int(kInlineBases), "bases are loaded before PEs are known to exist");
  if constexpr (platform::kDefersRemoteWrites) {
    for (int i = 0; i < Pes; i++)
      put_vector(ctx, dst, (const char*)src + (Rows == 1 ? 0 : i) * 16, bytes, (first + i) % Pes);
    return;
  }
  uint64_t base[Pes];
  TSN_UNROLL
  for (int i = 0; i < Pes; i++) base[i] = platform::load_invariant(&ctx->peer_base[i]);
  const uint64_t heap_base = platform::load_invariant(&ctx->heap_base);
  const uint64_t heap_bytes = platform::load_invariant(&ctx->heap_bytes);
  bool go = platform::load_recent(&ctx->aborted) == 0;
  TSN_UNROLL
  for (int i = 0; i < Pes; i++) go &= base[i] != 0;
  const uint64_t offset = (uint64_t)dst - heap_base;
  go &= (offset - kSystemBytes <= heap_bytes - kSystemBytes) & (offset + uint64_t(bytes) <= heap_bytes);
  if (TSN_UNLIKELY(!go)) return detail::report_puts(ctx, dst, bytes, Pes);
  // base[i] of PE first + i: registers need constant indices.
  TSN_UNROLL
  for (int step = 1; step < Pes; step *= 2) {
    uint64_t turned[Pes];
    TSN_UNROLL
    for (int i = 0; i < Pes; i++) turned[i] = base[(i + step) % Pes];
    TSN_UNROLL
    for (int i = 0; i < Pes; i++) base[i] = first & step ? turned[i] : base[i];
  }
  TSN_UNROLL
  for (int i = 0; i < Pes; i++) {
    using detail::word_to_send;
    Vec16 v;
    memcpy(&v, (const char*)src + (Rows == 1 ? 0 : i) * sizeof v, sizeof v);
    detail::store_words((Vec16*)(base[i] + offset),
                        {word_to_send(v.x), word_to_send(v.y), word_to_send(v.z), word_to_send(v.w)});
  }
}

// Waits until Rows vectors, `pitch` bytes apart, have arrived, returns them and clears their memory. Called by one
// thread. Ends early, with the words that have arrived, if the job is aborted or the deadline passes.
template <int Rows>
TSN_DEVICE void take_vectors(const Context* ctx, void* dst, void* src, int64_t pitch) {
  Vec16 v[Rows];
  const auto row = [&](int i) { return (Vec16*)((char*)src + i * pitch); };
  const auto missing = [&] {
    int i = 0;
    while (i + 1 < Rows && detail::has_arrived(v[i])) i++;
    return (const uint64_t*)row(i);
  };
  spin(
      ctx, [&] { return SpinSubject{kOpWait, -1, missing(), 0, 1 + uint32_t(Compare::ne)}; },
      [&] {
        TSN_UNROLL
        for (int i = 0; i < Rows; i++) v[i] = detail::load_words(row(i));
        bool all = true;
        TSN_UNROLL
        for (int i = 0; i < Rows; i++) all &= detail::has_arrived(v[i]);
        return all;
      },
      [&] { fail(ctx, kWaitTimeout, kOpWait, -1, missing(), 0, 0, 0, 1 + uint32_t(Compare::ne)); });
  TSN_UNROLL
  for (int i = 0; i < Rows; i++) {
    using detail::word_received;
    const Vec16 word = {word_received(v[i].x), word_received(v[i].y), word_received(v[i].z), word_received(v[i].w)};
    memcpy((char*)dst + i * sizeof word, &word, sizeof word);
    detail::store_words(row(i), {0, 0, 0, 0});
  }
}

} // namespace tsn
