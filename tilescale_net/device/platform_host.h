// The platform of platform.h on a CPU: threads are fibers of the simulator, words that ranks share are host atomics,
// and the simulator delivers remote writes late. No other device header depends on either.
#pragma once

#include "context.h"
#include "host/thread.h"
#include "types.h"
#include <string.h>
#include <time.h>

#define TSN_DEVICE inline
#define TSN_COLD inline __attribute__((noinline))
#define TSN_UNROLL

namespace tsn {
namespace platform {

#ifdef TSN_HOST_STANDALONE
constexpr bool kDefersRemoteWrites = false;
#else
constexpr bool kDefersRemoteWrites = true;
#endif
constexpr uint32_t kPollsPerCheck = 4; // a poll runs all other threads once
constexpr uint32_t kWarpThreads = 32;
constexpr bool kHasBulk = true;
constexpr bool kHasAtomic16b = false; // no 16-byte atomic store

// ---------------------------------------------------------------------------------------------------------- indices

TSN_DEVICE uint32_t thread_index() { return sim::self().linear; }
TSN_DEVICE uint32_t block_threads() {
  const sim::Index3& n = sim::self().block_dim;
  return n.x * n.y * n.z;
}
TSN_DEVICE uint32_t block_index() { return sim::self().linear_block; }
TSN_DEVICE uint32_t grid_blocks() {
  const sim::Index3& n = sim::self().grid_dim;
  return n.x * n.y * n.z;
}
TSN_DEVICE uint32_t grid_id() { return 1; } // a process runs one launch at a time
TSN_DEVICE uint32_t lane() { return sim::self().lane; }
TSN_DEVICE uint32_t kept_in_register(uint32_t v) { return v; }

// -------------------------------------------------------------------------------------------------- synchronisation

TSN_DEVICE void block_sync() { sim::api().block_barrier(0, 0, false); }
TSN_DEVICE void lanes_sync(uint32_t lanes) { sim::api().warp(sim::WarpOp::sync, lanes, 0, 0); }
TSN_DEVICE void warp_sync() { lanes_sync(0xffffffffu); }
TSN_DEVICE uint64_t shuffle(uint32_t lanes, uint64_t v, int from) {
  return sim::api().warp(sim::WarpOp::shuffle, lanes, v, uint32_t(from));
}
TSN_DEVICE uint64_t warp_broadcast(uint64_t v) {
  warp_sync();
  return shuffle(0xffffffffu, v, 0);
}
template <class F>
TSN_DEVICE uint64_t block_broadcast(F f) {
  return sim::api().block_vote(sim::VoteOp::broadcast, thread_index() == 0 ? f() : 0);
}
TSN_DEVICE uint32_t match_lanes(uint32_t lanes, uint64_t v) {
  return uint32_t(sim::api().warp(sim::WarpOp::match_any, lanes, v, 0));
}
TSN_DEVICE uint32_t popcount(uint32_t v) { return uint32_t(__builtin_popcount(v)); }
// Out of line, so that the return address identifies the program location that the lanes share.
TSN_COLD uint32_t active_lanes() { return sim::api().active_mask(__builtin_return_address(0)); }

// ----------------------------------------------------------------------------------------------------------- memory

namespace detail {

template <class To, class From>
TSN_DEVICE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

constexpr int host_order(Order o) {
  switch (o) {
  case Order::acquire:
    return __ATOMIC_ACQUIRE;
  case Order::release:
    return __ATOMIC_RELEASE;
  case Order::acq_rel:
    return __ATOMIC_ACQ_REL;
  default:
    return __ATOMIC_RELAXED;
  }
}

template <Order O, MemScope S>
constexpr sim::Ordering ordering() {
  constexpr bool both = O == Order::acq_rel;
  // PTX: a volatile access is a relaxed one of system scope.
  return {both || O == Order::acquire, both || O == Order::release,
          uint32_t(O == Order::volatile_ ? MemScope::sys : S)};
}

// Other threads may observe the access, and run now and then; memory observed by other PEs is in the guarded heap.
template <MemScope S>
TSN_DEVICE void on_shared_access(const char* name, const void* p, uint64_t bytes, sim::WordAccess access) {
  if constexpr (S == MemScope::sys) sim::api().remote->check(name, p, bytes);
  sim::maybe_yield();
  sim::visit_word(p, bytes, access);
}

} // namespace detail

template <Order O, MemScope S, class T>
TSN_DEVICE T load(const T* p) {
  static_assert(O != Order::release && O != Order::acq_rel, "a load cannot release");
  detail::on_shared_access<S>("load", p, sizeof(T), sim::WordAccess::read);
  return detail::bits<T>(__atomic_load_n(reinterpret_cast<const WordOf<T>*>(p), detail::host_order(O)));
}

template <Order O, MemScope S, class T>
TSN_DEVICE void store(T* p, T v) {
  static_assert(O != Order::acquire && O != Order::acq_rel, "a store cannot acquire");
  detail::on_shared_access<S>("store", p, sizeof(T), sim::WordAccess::write);
  __atomic_store_n(reinterpret_cast<WordOf<T>*>(p), detail::bits<WordOf<T>>(v), detail::host_order(O));
}

// A kernel's own loads with these orders poll for another thread's write: each lets the others run.
template <Order O>
TSN_DEVICE void before_ld() {
  if constexpr (O == Order::acquire || O == Order::volatile_) sim::turn_of_others();
}

// Reports the order, which the access itself does not: load and store also serve the package's own words, whose order
// is reported elsewhere. Weak accesses are plain ones.
template <Order O, MemScope S, class T>
TSN_DEVICE void after_ld(const T* p) {
  if constexpr (O == Order::weak) return sim::note_load(p, sizeof(T), "a word", p);
  sim::note_local(p, sizeof(T), sim::LocalAccess::atomic_load, nullptr);
  sim::word_access(p, sizeof(T), sim::WordAccess::read, detail::ordering<O, S>());
}
template <Order O, MemScope S, class T, class V>
TSN_DEVICE void before_st(const T* p, V v) {
  if constexpr (O == Order::weak) return sim::note_store(p, sizeof(T), "a word", p);
  sim::note_local(p, sizeof(T), sim::LocalAccess::atomic, nullptr);
  sim::word_access(p, sizeof(T), sim::WordAccess::write, detail::ordering<O, S>(),
                   sim::written<T>(sim::Written::set, p, v));
}

template <class T>
TSN_DEVICE T load_constant(const T* p) {
  return *p;
}
template <class T>
TSN_DEVICE T load_invariant(const T* p) {
  return *p;
}
TSN_DEVICE uint64_t load_invariant_here(const uint64_t* p) { return *p; }
TSN_DEVICE uint64_t load_recent(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

// A GPU rejects misaligned addresses.
template <class T>
TSN_DEVICE void check_aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) sim::api().trap("misaligned address");
}

template <class T>
TSN_DEVICE T load_data(const T* p) {
  check_aligned(p);
  T v;
  memcpy(&v, p, sizeof(T));
  return v;
}

template <class T>
TSN_DEVICE void store_data(T* p, T v) {
  check_aligned(p);
  memcpy(p, &v, sizeof(T));
  sim::maybe_yield();
}

template <class T>
TSN_DEVICE void load_data_below(T* v, const T* p, int at, int limit) {
  if (at < limit) *v = load_data(p);
}
template <class T>
TSN_DEVICE void store_data_below(T* p, T v, int at, int limit) {
  if (at < limit) store_data(p, v);
}

// Consumers read each 8-byte word of a descriptor separately, the first one first.
TSN_DEVICE void store_16b(Vec16* p, Vec16 v) {
  uint64_t w[2];
  memcpy(w, &v, sizeof(v));
  uint64_t* words = reinterpret_cast<uint64_t*>(p);
  __atomic_store_n(words + 1, w[1], __ATOMIC_RELEASE);
  __atomic_store_n(words, w[0], __ATOMIC_RELEASE);
  sim::maybe_yield();
}
TSN_DEVICE void store_16b_below(Vec16* p, Vec16 v, int at, int limit) {
  if (at < limit) store_16b(p, v);
}

// ---------------------------------------------------------------------------------------------------------- atomics

template <AtomicOp Op, Order O, MemScope S, class T>
TSN_DEVICE T atomic(T* p, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics work on 4 and 8 bytes");
  constexpr bool kFloat = T(0.5) != T(0);
  static_assert(!kFloat || Op == AtomicOp::add || Op == AtomicOp::exch, "only add and exch on floating-point numbers");
  using W = WordOf<T>;
  detail::on_shared_access<S>("atomic", p, sizeof(T), sim::WordAccess::update);
  constexpr auto kHow = Op == AtomicOp::add    ? sim::Written::add
                        : Op == AtomicOp::exch ? sim::Written::set
                                               : sim::Written::other;
  sim::word_access(p, 0, sim::WordAccess::update, detail::ordering<O, S>(), sim::written<T>(kHow, p, value));
  const auto apply = [value](T old) -> T {
    if constexpr (Op == AtomicOp::add) return old + value;
    if constexpr (Op == AtomicOp::min) return value < old ? value : old;
    if constexpr (Op == AtomicOp::max) return old < value ? value : old;
    if constexpr (Op == AtomicOp::exch) return value;
    if constexpr (!kFloat) {
      if constexpr (Op == AtomicOp::and_) return old & value;
      if constexpr (Op == AtomicOp::or_) return old | value;
      if constexpr (Op == AtomicOp::xor_) return old ^ value;
    }
  };
  W* word = reinterpret_cast<W*>(p);
  W old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, detail::bits<W>(apply(detail::bits<T>(old))), false,
                                      detail::host_order(O), __ATOMIC_RELAXED)) {
  }
  sim::word_found(p, detail::ordering<O, S>());
  return detail::bits<T>(old);
}

TSN_DEVICE void store_pair(void* p, uint64_t first, uint64_t second) {
  const uint64_t pair[2] = {first, second};
  memcpy(p, pair, sizeof pair);
}

TSN_DEVICE uint64_t add_one_ahead(uint64_t* p) {
  return atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(p, uint64_t(1));
}

template <Order O, MemScope S, class T>
TSN_DEVICE T atomic_cas(T* p, T compare, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics work on 4 and 8 bytes");
  using W = WordOf<T>;
  detail::on_shared_access<S>("atomic", p, sizeof(T), sim::WordAccess::update);
  sim::word_access(p, 0, sim::WordAccess::update, detail::ordering<O, S>());
  W old = detail::bits<W>(compare);
  const bool taken = __atomic_compare_exchange_n(reinterpret_cast<W*>(p), &old, detail::bits<W>(value), false,
                                                 detail::host_order(O), __ATOMIC_RELAXED);
  sim::word_found(p, detail::ordering<O, S>());
  if (!taken) sim::api().yield(true); // usually retried in a loop
  return detail::bits<T>(old);
}

TSN_DEVICE void add_relaxed(uint64_t* p, uint64_t value) { __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
TSN_DEVICE void add_release(uint64_t* p, uint64_t value) { __atomic_fetch_add(p, value, __ATOMIC_RELEASE); }

template <MemScope S>
TSN_DEVICE void fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  sim::fenced(uint32_t(S), false); // fence.acq_rel
}

template <class T>
TSN_DEVICE T opaque(T v) {
  return v;
}

// ------------------------------------------------------------------------------------------------------------- time

TSN_DEVICE uint64_t timer_ns() {
  if (sim::self().scheduled) return 32; // the result of a wait does not depend on time
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}
TSN_DEVICE uint32_t ticks() { return uint32_t(timer_ns()); }
TSN_DEVICE void relax() { sim::api().yield(true); }

} // namespace platform
} // namespace tsn

#include "platform_host_remote.h"
