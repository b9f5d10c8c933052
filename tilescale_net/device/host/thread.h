// The running thread and the simulator's functions, for code compiled into a simulated kernel.
//
// With TSN_HOST_STANDALONE the device headers work in a plain program, without a simulator: each operating-system
// thread is a block of one thread, and nothing is deferred.
#pragma once

#include "simulator_api.h"

#include <type_traits>

#ifdef TSN_HOST_STANDALONE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#endif

namespace tsn {
namespace sim {

// The simulator computes with signed numbers.
template <typename T>
inline int64_t as_number(T value) {
  if constexpr (std::is_integral<T>::value && sizeof(T) > 1) return static_cast<std::make_signed_t<T>>(value);
  return static_cast<int64_t>(value);
}
// The effect of an access on an integer at `p`.
template <typename T>
inline Written written(Written::How how, const T* p, T value) {
  if constexpr (std::is_integral<T>::value)
    return {how, as_number(value), how == Written::set ? as_number(__atomic_load_n(p, __ATOMIC_RELAXED)) : 0};
  return {};
}

#ifdef TSN_HOST_STANDALONE

inline const Api& api() {
  static const RemoteApi remote = {
      [](const Call&) {},
      [](const Call&) {},
      [](const uint64_t*) {},
      [](const void*, uint64_t, WordAccess, Ordering, Written) {},
      [](int64_t, bool (*)(const void*, int64_t), const void*) {},
      [](uint32_t, bool) {},
      [](const void*, uint64_t, WordAccess) {},
      [](const void*, uint64_t, bool, const char*) {},
      [](const void*, uint64_t, bool, const char*) {},
      [](const void*, uint64_t, LocalAccess, const char*, const void*) {},
      [](const void*, uint64_t) {},
      [] {},
      [](const uint64_t*, int, uint64_t, bool) {},
      [](const RemoteOperation&) { return false; },
      [](uint64_t, bool) {},
      [](const void*, bool) {},
      [](int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); },
      [](int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); },
      [](const char*, const void*, uint64_t) {},
  };
  static const Api api = {
      kApiVersion,
      sizeof(Api),
      [](bool) { sched_yield(); },
      [](int, int, bool) {},
      [](VoteOp, uint64_t value) { return value; },
      [](WarpOp op, uint32_t, uint64_t value, uint32_t) { return op < WarpOp::ballot ? value : uint64_t(1); },
      [](const void*) { return uint32_t(1); },
      [] {},
      [](int, size_t bytes) -> void* {
        alignas(128) static thread_local char block_shared[1 << 14];
        return bytes <= sizeof(block_shared) ? block_shared : (abort(), nullptr);
      },
      [](const char*, int64_t, uint64_t, uint64_t) { abort(); },
      [](const char*, int, int64_t, int64_t) { abort(); },
      [](const char* message) {
        fprintf(stderr, "%s\n", message);
        abort();
      },
      [](const char* text) { puts(text); },
      [] { return uint64_t(0); },
      &remote,
      nullptr,
  };
  return api;
}

inline Thread& self() {
  static thread_local Thread thread = [] {
    Thread alone{};
    alone.block_dim = alone.grid_dim = {1, 1, 1};
    alone.site = -1;
    return alone;
  }();
  return thread;
}

inline void maybe_yield() {}
inline void turn_of_others() { sched_yield(); }
inline void word_access(const void*, uint64_t, WordAccess, Ordering, Written = {}) {}
inline void word_found(const void*, Ordering) {}
inline void fenced(uint32_t, bool) {}
inline void visit_word(const void*, uint64_t, WordAccess) {}
inline void note_store(const void*, uint64_t, const char*, const void* = nullptr) {}
inline void note_load(const void*, uint64_t, const char*, const void* = nullptr) {}
inline void note_local(const void*, uint64_t, LocalAccess, const char*, const void* = nullptr) {}
inline bool in_symmetric_heap(const void*) { return false; }

#else

// Set when the library is loaded, and before every switch to another thread.
extern "C" const Api* tsn_sim_api;
extern "C" Thread* tsn_sim_self;

inline const Api& api() { return *tsn_sim_api; }
inline Thread& self() { return *tsn_sim_self; }

// Yields to other threads now and then, by the seed; called around every access that they may observe.
inline void maybe_yield() {
  if (--self().quantum <= 0) api().yield(false);
}

// Before a load by which a thread may poll. A scheduler detects polls by the load itself.
inline void turn_of_others() {
  if (!self().scheduled) api().yield(true);
}

// `bytes`: 0 if the access itself is reported elsewhere.
inline void word_access(const void* address, uint64_t bytes, WordAccess access, Ordering ordering,
                        Written written = {}) {
  if (self().followed) api().remote->word(address, bytes, access, ordering, written);
}

// A load in a loop with an empty body that ends when `goes_on` returns false for the value. The thread then knows only
// what all values that end the loop show: another schedule may give another one.
template <typename L, typename C>
inline auto poll(L load, C goes_on) {
  Thread& t = self();
  t.polls = t.followed;
  const auto value = load();
  using T = std::remove_const_t<decltype(value)>;
  if (t.polls && !goes_on(value))
    api().remote->polled(
        as_number(value),
        [](const void* condition, int64_t v) { return !(*static_cast<const C*>(condition))(static_cast<T>(v)); },
        &goes_on);
  t.polls = false;
  return value;
}

// A fence orders the thread's accesses to such words that have no order of their own. Of a MemScope; `total`: its
// later loads, too, come after its earlier stores.
inline void fenced(uint32_t scope, bool total) {
  if (self().followed) api().remote->fenced(scope, total);
}

// A word was changed and had another value than before: reports another rank's change in between.
inline void word_found(const void* address, Ordering ordering) {
  ordering.releases = false;
  if (reinterpret_cast<uint64_t>(address) - self().heap_base < self().heap_bytes)
    word_access(address, 0, WordAccess::read, ordering);
}

inline void visit_word(const void* address, uint64_t bytes, WordAccess access) {
  if (__builtin_expect(self().scheduled, 0)) api().remote->visit(address, bytes, access);
}

inline bool in_symmetric_heap(const void* p) {
  return reinterpret_cast<uint64_t>(p) - self().heap_base < self().heap_bytes;
}

// The running thread accesses [p, p + bytes) of the heap. The simulator checks accesses after another rank's, or
// after a transfer; the order is checked once per run of bytes.
__attribute__((noinline)) inline void access_heap(const void* p, uint64_t bytes, bool store, const char* name) {
  const Thread& t = self();
  const uint64_t offset = reinterpret_cast<uint64_t>(p) - t.heap_base, own = t.stamp & 0xff;
  const HeapAccesses& made = store ? t.stores : t.loads;
  const uint16_t site = t.heap_sites[t.site + 1];
  const auto comes_after = [&](uint64_t stored, uint64_t loaded) {
    return (stored == 0 || (stored & 0xff) == own || stored == t.ordered_store) &&
           (loaded == 0 || (loaded & 0xff) == own || loaded == t.ordered_load);
  };
  const auto read = [](const uint64_t* stamp) { return __atomic_load_n(stamp, __ATOMIC_RELAXED); };
  if (__builtin_expect((offset | bytes) % 4, 0)) {
    for (uint64_t at = offset; at < offset + bytes; ++at) {
      const uint64_t stored = read(t.stores.words + at / 4), loaded = read(t.loads.words + at / 4);
      const bool parted = (store ? stored : loaded) == kByBytes;
      if (!parted || !comes_after(stored == kByBytes ? read(t.stores.bytes + at) : stored,
                                  loaded == kByBytes ? read(t.loads.bytes + at) : loaded))
        return api().remote->accessed(p, bytes, store, name);
      __atomic_store_n(made.bytes + at, t.stamp, __ATOMIC_RELAXED);
      made.byte_sites[at] = site;
    }
    return;
  }
  for (uint64_t i = offset / 4; i < (offset + bytes) / 4; ++i) {
    if (!comes_after(read(t.stores.words + i), read(t.loads.words + i)))
      return api().remote->accessed(p, bytes, store, name);
    __atomic_store_n(made.words + i, t.stamp, __ATOMIC_RELAXED);
    made.word_sites[i] = site;
  }
}

// Whether an access with this stamp is known to come before the thread's own, as far as that can be decided here.
__attribute__((always_inline)) inline bool local_after(const Thread& t, uint64_t stamp) {
  if (stamp >> 32 < t.local_begin || !((stamp ^ t.local_stamp) & kLocalThread)) return true;
  const uint64_t known = t.local_known[local_slot(stamp)];
  return known >> 32 == (stamp & kLocalThread) >> 11 && stamp >> 32 <= static_cast<uint32_t>(known);
}

// The running thread accesses memory of its rank.
__attribute__((noinline)) inline void access_local(const void* p, uint64_t bytes, LocalAccess access, const char* name,
                                                   const void* base) {
  const Thread& t = self();
  const uint64_t begin = reinterpret_cast<uint64_t>(p), end = begin + bytes;
  const uint64_t info = (reinterpret_cast<uint64_t>(name) & ((1ull << 48) - 1)) |
                        static_cast<uint64_t>(static_cast<uint16_t>(t.site + 1)) << 48;
  for (uint64_t at = begin / 4 * 4; at < end; at += 4) {
    const LocalPages::Line& line = t.local->lines[at / kLocalPage % kLocalLines];
    if (line.number != at / kLocalPage || access >= LocalAccess::atomic)
      return api().remote->local_access(p, bytes, access, name, base);
    LocalCell& c = line.cells[at % kLocalPage / 4];
    const bool after_loads = access == LocalAccess::load || (local_after(t, c.load[0]) && local_after(t, c.load[1]));
    if (!after_loads || !local_after(t, c.store)) return api().remote->local_access(p, bytes, access, name, base);
    const uint64_t own = t.local_stamp | local_mask(at, begin, bytes);
    if (access == LocalAccess::load) local_loaded(c, own, info);
    else local_stored(c, own, info);
  }
}

__attribute__((always_inline)) inline void note_local(const void* p, uint64_t bytes, LocalAccess access,
                                                      const char* name, const void* base = nullptr) {
  if (__builtin_expect(self().local != nullptr, 0)) access_local(p, bytes, access, name, base);
}
inline void note_view(const void* p, uint64_t bytes, bool store, const char* name) {
  if (reinterpret_cast<uint64_t>(p) - self().peers_begin < self().peers_bytes)
    api().remote->viewed(p, bytes, store, name);
}
inline void note_store(const void* p, uint64_t bytes, const char* name, const void* base = nullptr) {
  note_local(p, bytes, LocalAccess::store, name, base);
  if (!self().stores.words) return;
  if (in_symmetric_heap(p)) access_heap(p, bytes, true, name);
  else note_view(p, bytes, true, name);
}
inline void note_load(const void* p, uint64_t bytes, const char* name, const void* base = nullptr) {
  note_local(p, bytes, LocalAccess::load, name, base);
  if (!self().loads_followed || !self().stores.words) return;
  if (in_symmetric_heap(p)) access_heap(p, bytes, false, name);
  else note_view(p, bytes, false, name);
}

// Line of the next primitive, in the kernel's table; lives until the call has returned.
class At {
public:
  At(int site, bool uses_result) {
    self().site = site;
    self().uses_result = uses_result;
  }
  ~At() {
    self().uses_result = true; // of calls with an unknown place
    if (*api().trace->traces) api().trace->call_ends();
  }
  At(const At&) = delete;
  At& operator=(const At&) = delete;
};

#endif

// The block's own copy of a __shared__ variable; `id` numbers the declarations of a kernel.
template <typename T>
inline T& static_shared(int id) {
  return *static_cast<T*>(api().static_shared(id, sizeof(T)));
}

} // namespace sim
} // namespace tsn
