// Accesses to single words: loads and stores with an explicit order and scope, of 1, 2, 4 or 8 bytes; and atomic
// operations on symmetric memory of mapped PEs: system scope, relaxed, `fence` orders them if that matters.
#pragma once

#include "address.h"
#include "put.h"

namespace tsn {

namespace detail {

// The target of an atomic on the PE; null, after an abort of the job, if there is none.
template <class T>
TSN_DEVICE T* atomic_target(const Context* ctx, T* dst, int pe) {
  enter<Scope::thread>(kOpAtomic, dst, sizeof(T), pe);
  const PeerAccess access(ctx, pe);
  if (!access.validate<Scope::thread>(kOpAtomic, dst, sizeof(T)) || access.aborted) return nullptr;
  if (access.direct()) return access.translate(dst);
  fail(ctx, kUnsupported, kOpAtomic, pe, dst, 0, 0, sizeof(T));
  return nullptr;
}

} // namespace detail

// Applies Op and returns the old value; 0 when the job is aborted. Called by one thread.
template <AtomicOp Op, class T>
TSN_DEVICE T atomic(const Context* ctx, T* dst, typename Value<T>::type value, int pe) {
  T* peer = detail::atomic_target(ctx, dst, pe);
  if (peer == nullptr) return T(0);
  if constexpr (platform::kDefersRemoteWrites) {
    T old;
    if (platform::defer_atomic<T>(ctx, Op, dst, peer, value, pe, &old)) return old;
  }
  return platform::atomic<Op, Order::relaxed, MemScope::sys>(peer, value);
}

template <class T>
TSN_DEVICE T atomic_cas(const Context* ctx, T* dst, typename Value<T>::type compare, typename Value<T>::type value,
                        int pe) {
  T* peer = detail::atomic_target(ctx, dst, pe);
  if (peer == nullptr) return T(0);
  if constexpr (platform::kDefersRemoteWrites) {
    T old;
    if (platform::defer_atomic_cas<T>(ctx, dst, peer, compare, value, pe, &old)) return old;
  }
  return platform::atomic_cas<Order::relaxed, MemScope::sys>(peer, compare, value);
}

template <Order O, MemScope S, class T>
TSN_DEVICE T ld(const T* p) {
  if constexpr (platform::kDefersRemoteWrites) platform::before_ld<O>(), platform::reach(p, false);
  const T v = platform::load<O, S>(p);
  if constexpr (platform::kDefersRemoteWrites) platform::after_ld<O, S>(p);
  return v;
}

template <Order O, MemScope S, class T>
TSN_DEVICE void st(T* p, typename Value<T>::type v) {
  if constexpr (platform::kDefersRemoteWrites) platform::reach(p, true), platform::before_st<O, S>(p, v);
  platform::store<O, S>(p, v);
}

// Declares that accesses to these bytes, and to the same offsets of other PEs' heaps, race on purpose. For race
// detectors only.
TSN_DEVICE void benign_race(const Context*, const void* p, int64_t bytes) {
  if constexpr (platform::kDefersRemoteWrites) platform::benign_race(p, bytes);
}

} // namespace tsn
