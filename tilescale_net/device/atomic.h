// Atomic operations on symmetric memory of mapped PEs: system scope, relaxed; `fence` orders them where that matters.
#pragma once

#include "address.h"
#include "put.h"

namespace tsn {

namespace detail {

// Where an atomic on the PE goes; null where it cannot, which aborts the job.
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

// Applies Op and returns the old value; 0 when the job is aborted. By one thread.
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

} // namespace tsn
