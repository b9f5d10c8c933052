// Strided rows: a box of a matrix, one of its columns, the faces of a grid.
//
// A row is contiguous; the pitch is the distance in bytes between the beginnings of consecutive rows, at the
// target and at the source. Over mapped memory all threads of the scope share the units of all rows; through the proxy
// each row is an operation of its own.
#pragma once

#include "copy.h"
#include "put.h"
#include "signal.h"

namespace tsn {

struct Rows {
  int64_t rows, bytes; // bytes: of one row
  int64_t dst_pitch, src_pitch;

  TSN_DEVICE bool empty() const { return rows <= 0 || bytes <= 0; }
  // From the first byte of the first row to the last one of the last, 0 if empty.
  TSN_DEVICE int64_t span(int64_t pitch) const { return empty() ? 0 : (rows - 1) * pitch + bytes; }
};

namespace detail {

// A thread's position among the units of all rows: its offsets from both ends.
struct RowCursor {
  uint64_t column; // bytes from the beginning of the row
  int64_t dst, src;
};

// Every thread.count-th unit of all rows, from number part.index on; U of them are loaded before the first is stored.
template <int U, class T>
TSN_DEVICE void copy_row_units(char* dst, const char* src, const Rows& r, Part part) {
  const uint64_t per_row = uint64_t(r.bytes) / sizeof(T), total = per_row * uint64_t(r.rows);
  // A thread's stride in units: some whole rows, and some units more.
  uint32_t step_rows = 0, step = part.threads, first_row = 0, first = part.index;
  if (per_row <= part.threads) {
    const uint32_t width = uint32_t(per_row);
    step_rows = part.threads / width, step = part.threads % width;
    first_row = part.index / width, first = part.index % width;
  }
  const uint64_t step_bytes = uint64_t(step) * sizeof(T);
  const int64_t dst_step = step_rows * r.dst_pitch + int64_t(step_bytes), dst_wrap = r.dst_pitch - r.bytes;
  const int64_t src_step = step_rows * r.src_pitch + int64_t(step_bytes), src_wrap = r.src_pitch - r.bytes;
  const auto advance = [&](RowCursor& c) {
    const bool wraps = (c.column += step_bytes) >= uint64_t(r.bytes);
    c.column -= wraps ? uint64_t(r.bytes) : 0;
    c.dst += dst_step + (wraps ? dst_wrap : 0);
    c.src += src_step + (wraps ? src_wrap : 0);
  };
  const int64_t begin = int64_t(first * uint64_t(sizeof(T)));
  RowCursor next = {uint64_t(begin), first_row * r.dst_pitch + begin, first_row * r.src_pitch + begin};
  TSN_ROLLED
  for (uint64_t at = part.index; at < total; at += uint64_t(part.threads) * U) {
    const int left = int(total - at < (1u << 30) ? total - at : 1u << 30);
    RowCursor now = next;
    T row[U];
    TSN_UNROLL
    for (int u = 0; u < U; u++, advance(next))
      platform::load_data_below(&row[u], (const T*)(src + next.src), int(u * part.threads), left);
    TSN_UNROLL
    for (int u = 0; u < U; u++, advance(now))
      platform::store_data_below((T*)(dst + now.dst), row[u], int(u * part.threads), left);
  }
}

// Out of line: one copy of it serves all calls of a kernel.
template <int Unroll>
TSN_COLD void copy_rows(char* dst, const char* src, Rows r, Part part) {
  const uint64_t pitches = r.rows > 1 ? uint64_t(r.dst_pitch | r.src_pitch) : 0;
  const uint32_t unit =
      widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | uint64_t(r.bytes) | pitches);
  constexpr int kNarrow = Unroll < 4 ? Unroll : 4;
  with_unit(unit, [&](auto tag) {
    using T = typename decltype(tag)::type;
    copy_row_units<sizeof(T) == 16 ? Unroll : kNarrow, T>(dst, src, r, part);
  });
}

// The threads that push a scope's rows to the proxy, one descriptor each at a time: one warp of it.
template <Scope S>
TSN_DEVICE Part row_pushers() {
  Part part = scope_part<S>();
  if (part.threads > platform::kWarpThreads) part.threads = platform::kWarpThreads;
  return part;
}
template <Scope S>
TSN_DEVICE void row_pushers_sync() {
  if constexpr (S == Scope::thread) return;
  const uint32_t threads = row_pushers<S>().threads;
  platform::lanes_sync(threads < platform::kWarpThreads ? (1u << threads) - 1 : ~0u);
}

// Rows rejected by PeerAccess::may_proceed(), by the pushers. With a signal word: also the signal, in this order.
template <Scope S, SignalOp Op>
TSN_COLD void put_rows_by_proxy_or_fail(const Context* ctx, char* dst, const char* src, Rows r, int pe, uint64_t* sig,
                                        uint64_t value) {
  const Part part = row_pushers<S>();
  if (part.index >= part.threads) return;
  const PeerAccess access(ctx, pe);
  const int64_t span = r.span(r.dst_pitch);
  const bool fine =
      sig == nullptr ? access.validate<S>(kOpPut, dst, span) : access.validate<S>(kOpPutSignal, dst, span, sig);
  if (!fine || access.direct()) return; // a mapped PE and an aborted job, which other threads may not have seen yet
  queue_publish();
  if (!r.empty() && !access.aborted)
    for (int64_t i = part.index; i < r.rows; i += part.threads)
      queue_put<false>(ctx, dst + i * r.dst_pitch, src + i * r.src_pitch, r.bytes, pe);
  if (sig == nullptr) return;
  row_pushers_sync<S>();
  if (!scope_leader<S>() || access.aborted) return;
  queue_fence(ctx, pe);
  queue_signal<false>(ctx, sig, value, pe, Op);
}

template <Scope S>
TSN_COLD void get_rows_by_proxy(const Context* ctx, char* dst, const char* src, Rows r, int pe, bool aborted) {
  const Part part = row_pushers<S>();
  if (part.index >= part.threads || r.empty()) return;
  queue_publish();
  if (!aborted)
    for (int64_t i = part.index; i < r.rows; i += part.threads)
      queue_get<false>(ctx, dst + i * r.dst_pitch, src + i * r.src_pitch, r.bytes, pe);
  row_pushers_sync<S>();
  if (scope_leader<S>() && !aborted) queue_wait(ctx, queue_flush(ctx, pe), kOpGet);
}

// put_rows, and with a signal word put_signal_rows.
template <Scope S, int Unroll, SignalOp Op>
TSN_DEVICE void push_rows(const Context* ctx, char* dst, const char* src, const Rows& r, int pe, uint64_t* sig,
                          uint64_t value) {
  const Operation operation = sig == nullptr ? kOpPut : kOpPutSignal;
  const int64_t span = r.span(r.dst_pitch);
  scope_enter<S>(operation, dst, src, r.empty() ? 0 : r.bytes, pe, sig, value, Op, r.rows, r.dst_pitch, r.src_pitch);
  const PeerAccess access(ctx, pe);
  const bool may_proceed =
      sig == nullptr ? access.may_proceed<S>(operation, dst, span) : access.may_proceed<S>(operation, dst, span, sig);
  if (TSN_UNLIKELY(!may_proceed)) {
    put_rows_by_proxy_or_fail<S, Op>(ctx, dst, src, r, pe, sig, value);
    return sig == nullptr ? void() : scope_sync<S>();
  }
  char* peer = access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites) {
    uint64_t* peer_sig = sig == nullptr ? nullptr : access.translate(sig);
    if (scope_deferred<S>([&] {
          return access.aborted || platform::defer_put_rows(ctx, dst, peer, src, r.empty() ? 0 : r.rows, r.bytes,
                                                            r.dst_pitch, r.src_pitch, pe, sig, peer_sig, value, Op);
        }))
      return;
  }
  if (!r.empty()) copy_rows<Unroll>(peer, src, r, scope_part<S>());
  if (sig == nullptr) return;
  scope_sync<S>();
  if (scope_leader<S>()) release_signal<Op>(access.translate(sig), value);
}

} // namespace detail

// As put, of `rows` rows of `bytes` each. Called by all threads of the scope with equal arguments.
template <Scope S, int Unroll>
TSN_DEVICE void put_rows(const Context* ctx, void* dst, const void* src, int64_t rows, int64_t bytes, int64_t dst_pitch,
                         int64_t src_pitch, int pe) {
  detail::push_rows<S, Unroll, SignalOp::set>(ctx, (char*)dst, (const char*)src, {rows, bytes, dst_pitch, src_pitch},
                                              pe, nullptr, 0);
}

// As put_signal, of rows.
template <Scope S, int Unroll, SignalOp Op>
TSN_DEVICE void put_signal_rows(const Context* ctx, void* dst, const void* src, int64_t rows, int64_t bytes,
                                int64_t dst_pitch, int64_t src_pitch, int pe, uint64_t* sig, uint64_t value) {
  detail::push_rows<S, Unroll, Op>(ctx, (char*)dst, (const char*)src, {rows, bytes, dst_pitch, src_pitch}, pe, sig,
                                   value);
}

// As get, of rows.
template <Scope S, int Unroll>
TSN_DEVICE void get_rows(const Context* ctx, void* dst, const void* src, int64_t rows, int64_t bytes, int64_t dst_pitch,
                         int64_t src_pitch, int pe) {
  const Rows r = {rows, bytes, dst_pitch, src_pitch};
  // Waits for threads that still read the destination.
  scope_enter<S>(kOpGet, dst, src, r.empty() ? 0 : bytes, pe, nullptr, 0, SignalOp::set, rows, dst_pitch, src_pitch);
  const PeerAccess access(ctx, pe);
  if (TSN_LIKELY(access.validate<S>(kOpGet, src, r.span(src_pitch)))) {
    if constexpr (platform::kDefersRemoteWrites)
      if (scope_leader<S>()) platform::inspect(kOpGet, dst, r.span(dst_pitch));
    if (TSN_UNLIKELY(!access.direct())) {
      detail::get_rows_by_proxy<S>(ctx, (char*)dst, (const char*)src, r, pe, access.aborted);
    } else if (TSN_LIKELY(!access.aborted && !r.empty())) {
      detail::copy_rows<Unroll>((char*)dst, access.translate((const char*)src), r, scope_part<S>());
    }
  }
  scope_sync<S>();
}

} // namespace tsn
