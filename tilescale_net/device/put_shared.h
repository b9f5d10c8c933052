// Puts whose source is shared memory: a tile goes to mapped memory of a PE without a stay in global memory.
//
// The source is read during the call, by the threads that store it: after a barrier of the scope it may be written
// again. A PE that is not mapped is an error, because the fabric reads symmetric memory only.
#pragma once

#include "put.h"
#include "signal.h"

namespace tsn {

namespace detail {

template <int U, class T>
TSN_DEVICE void copy_shared_units(T* dst, const T* src, uint32_t count, Part part) {
  TSN_ROLLED
  for (uint32_t at = part.index; at < count; at += part.threads * U) {
    T row[U];
    TSN_UNROLL
    for (uint32_t u = 0; u < U; u++)
      if (at + u * part.threads < count) row[u] = src[at + u * part.threads];
    TSN_UNROLL
    for (uint32_t u = 0; u < U; u++)
      if (at + u * part.threads < count) platform::store_data(dst + at + u * part.threads, row[u]);
  }
}

// A block has less than 2^32 bytes of shared memory.
TSN_COLD void copy_shared(char* dst, const char* src, uint32_t bytes, Part part) {
  const uint32_t unit = widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes);
  with_unit(unit, [&](auto tag) {
    using T = typename decltype(tag)::type;
    copy_shared_units<4>((T*)dst, (const T*)src, uint32_t(bytes / sizeof(T)), part);
  });
}

// put_shared, and with a signal word put_signal_shared.
template <Scope S, SignalOp Op>
TSN_DEVICE void push_shared(const Context* ctx, char* dst, const char* src, int64_t bytes, int pe, uint64_t* sig,
                            uint64_t value) {
  const Operation operation = sig == nullptr ? kOpPut : kOpPutSignal;
  scope_enter<S>(operation, dst, src, bytes, pe, sig, value, Op); // what the scope wrote to the source is sent
  const PeerAccess access(ctx, pe);
  const bool fine =
      sig == nullptr ? access.validate<S>(operation, dst, bytes) : access.validate<S>(operation, dst, bytes, sig);
  if (TSN_UNLIKELY(!fine)) return;
  if (TSN_UNLIKELY(!access.direct())) {
    if (scope_leader<S>() && !access.aborted) fail(ctx, kNotDirect, operation, pe, dst, 0, 0, uint64_t(bytes));
    return;
  }
  char* peer = access.translate(dst);
  if constexpr (platform::kDefersRemoteWrites) {
    if (scope_deferred<S>([&] {
          if (access.aborted) return true;
          return sig == nullptr ? platform::defer_put(ctx, dst, peer, src, bytes, pe)
                                : platform::defer_put_signal(ctx, dst, peer, src, bytes, pe, sig, access.translate(sig),
                                                             value, Op);
        }))
      return;
  } else if (TSN_UNLIKELY(access.aborted)) {
    return sig == nullptr ? void() : scope_sync<S>();
  }
  if constexpr (S == Scope::thread) {
    const struct {
      uint32_t unit;
      int64_t bytes;
    } tile = {widest_unit(reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | uint64_t(bytes)), bytes};
    if (sig != nullptr && fits_packet<Op>(tile, dst, sig)) return put_packet(peer, *(const uint64_t*)src, value);
  }
  if (bytes > 0) copy_shared(peer, src, uint32_t(bytes), scope_part<S>());
  if (sig == nullptr) return;
  scope_sync<S>();
  if (scope_leader<S>()) release_signal<Op>(access.translate(sig), value);
}

} // namespace detail

// As put. By all threads of the scope with equal arguments.
template <Scope S>
TSN_DEVICE void put_shared(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe) {
  detail::push_shared<S, SignalOp::set>(ctx, (char*)dst, (const char*)src, bytes, pe, nullptr, 0);
}

// As put_signal.
template <Scope S, SignalOp Op>
TSN_DEVICE void put_signal_shared(const Context* ctx, void* dst, const void* src, int64_t bytes, int pe, uint64_t* sig,
                                  uint64_t value) {
  detail::push_shared<S, Op>(ctx, (char*)dst, (const char*)src, bytes, pe, sig, value);
}

} // namespace tsn
