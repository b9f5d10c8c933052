// Scopes: the threads that make a call together. All threads of a block make a block-scope call, all lanes of a warp a
// warp-scope call; the leader is thread 0 or lane 0.
#pragma once

#include "platform.h"

namespace tsn {

constexpr int kNoPe = -2; // of calls that concern no PE

template <Scope S>
TSN_DEVICE bool scope_leader() {
  if constexpr (S == Scope::thread) return true;
  if constexpr (S == Scope::warp) return platform::lane() == 0;
  if constexpr (S == Scope::block) return platform::thread_index() == 0;
}

template <Scope S>
TSN_DEVICE void scope_sync() {
  if constexpr (S == Scope::warp) platform::warp_sync();
  if constexpr (S == Scope::block) platform::block_sync();
}

// The leader's f(), to all threads of the scope; orders memory among them.
template <Scope S, class F>
TSN_DEVICE uint64_t scope_broadcast(F f) {
  if constexpr (S == Scope::warp) return platform::warp_broadcast(platform::lane() == 0 ? f() : 0);
  if constexpr (S == Scope::block) return platform::block_broadcast(f);
  return f();
}

// The calling thread's index in its scope, and the size of the scope.
struct Part {
  uint32_t index, threads;
};
template <Scope S>
TSN_DEVICE Part scope_part() {
  if constexpr (S == Scope::warp) return {platform::lane(), platform::kWarpThreads};
  if constexpr (S == Scope::block) return {platform::thread_index(), platform::block_threads()};
  return {0, 1};
}

// The start of a call in which the scope meets: orders memory among its threads. A platform that checks calls gets
// each thread's request, and from the leader the operation that follows.
template <Scope S>
TSN_DEVICE void scope_enter(Operation operation, const void* dst, const void* src, int64_t bytes, int pe,
                            const uint64_t* sig = nullptr, uint64_t value = 0, SignalOp op = SignalOp::set,
                            int64_t rows = 1, int64_t dst_pitch = 0, int64_t src_pitch = 0) {
  if constexpr (platform::kDefersRemoteWrites)
    platform::announce(operation, S, dst, src, bytes, pe, sig, value, op, rows, dst_pitch, src_pitch);
  scope_sync<S>();
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_leader<S>())
      platform::begin(operation, S, dst, src, bytes, pe, sig, value, op, rows, dst_pitch, src_pitch);
}
// The same for a call of one thread, or one that meets later.
template <Scope S>
TSN_DEVICE void enter(Operation operation, const void* dst, int64_t bytes, int pe, const uint64_t* sig = nullptr,
                      uint64_t value = 0, SignalOp op = SignalOp::set) {
  if constexpr (platform::kDefersRemoteWrites) {
    platform::announce(operation, S, dst, nullptr, bytes, pe, sig, value, op, 1, 0, 0);
    if (scope_leader<S>()) platform::begin(operation, S, dst, nullptr, bytes, pe, sig, value, op, 1, 0, 0);
  }
}

// The offer of an operation to the platform, see "Deferral" in platform.h. `offer` runs in the leader.
template <Scope S, class Offer>
TSN_DEVICE bool scope_deferred(Offer offer) {
  if constexpr (S == Scope::thread) return offer();
  // A GPU's warp does not meet here, and so orders no memory.
  if constexpr (S == Scope::warp)
    return platform::shuffle(0xffffffffu, platform::lane() == 0 ? uint64_t(offer()) : 0, 0);
  return scope_broadcast<S>([&] { return uint64_t(offer()); });
}

// --- ranges ----------------------------------------------------------------------------------------------------------
// Ranges that a kernel's author names, for the timeline of TSN_TRACE. A warp's first lane draws them.

// On a GPU they are empty except in a trace: see traced_calls.h.
TSN_DEVICE void range_begin(const Context*) {
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_leader<Scope::warp>()) platform::range_begins();
}
TSN_DEVICE void range_end(const Context*) {
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_leader<Scope::warp>()) platform::range_ends();
}

} // namespace tsn
