// CUDA's atomic functions and tilelang's wrappers around them. They are real host atomics, because the words may be
// in a heap that other ranks, other processes, change at the same time.
#pragma once

#include "../types.h"
#include "builtins.h"

namespace tsn {
namespace sim {

// From tilelang's cuda::memory_order. CUDA's own functions are relaxed; all have GPU scope.
inline Ordering device_ordering(int order) {
  enum { relaxed, consume, acquire, release, acq_rel, seq_cst };
  const bool both = order == acq_rel || order == seq_cst;
  return {both || order == consume || order == acquire, both || order == release, uint32_t(MemScope::gpu),
          order == seq_cst};
}

// Applies `f` to *p atomically and returns the old value.
template <typename T, typename F>
inline T atomic_update(T* p, int order, F f, Written written = {}) {
  using Word = WordOf<T>;
  maybe_yield();
  visit_word(p, sizeof(T), WordAccess::update);
  note_local(p, sizeof(T), LocalAccess::atomic, nullptr);
  word_access(p, sizeof(T), WordAccess::update, device_ordering(order), written);
  Word* word = reinterpret_cast<Word*>(p);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED), next;
  do next = tsn_bits<Word>(f(tsn_bits<T>(old)));
  while (!__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  word_found(p, device_ordering(order));
  return tsn_bits<T>(old);
}
} // namespace sim
} // namespace tsn

#define TSN_ATOMIC(name, expression, how)                                                                              \
  template <typename T, typename V>                                                                                    \
  inline T name(T* p, V value, int order = 0) {                                                                        \
    const T b = static_cast<T>(value);                                                                                 \
    return tsn::sim::atomic_update(                                                                                    \
        p, order, [b](T a) { return static_cast<T>(expression); }, tsn::sim::written(tsn::sim::Written::how, p, b));   \
  }
TSN_ATOMIC(atomicAdd, a + b, add)
TSN_ATOMIC(atomicSub, a - b, other)
TSN_ATOMIC(atomicMax, a < b ? b : a, other)
TSN_ATOMIC(atomicMin, b < a ? b : a, other)
TSN_ATOMIC(atomicAnd, a& b, other)
TSN_ATOMIC(atomicOr, a | b, other)
TSN_ATOMIC(atomicXor, a ^ b, other)
TSN_ATOMIC(atomicExch, b, set)
TSN_ATOMIC(atomicInc, a >= b ? T(0) : T(a + 1), other)
TSN_ATOMIC(atomicDec, a == T(0) || a > b ? b : T(a - 1), other)
#undef TSN_ATOMIC
template <typename T, typename C, typename V>
inline T atomicCAS(T* p, C compare, V value) {
  const T expected = static_cast<T>(compare), next = static_cast<T>(value);
  const T old = tsn::sim::atomic_update(
      p, 0, [=](T a) { return tsn_bits<tsn::WordOf<T>>(a) == tsn_bits<tsn::WordOf<T>>(expected) ? next : a; });
  if (!(old == expected)) tsn::sim::api().yield(true); // a lost race is usually retried in a loop
  return old;
}

// tilelang's wrappers, with a cuda::memory_order. Every order executes as the strongest; the race detector uses the
// actual one.
#define TSN_TL_ATOMIC(Name, cuda)                                                                                      \
  template <typename T, typename V>                                                                                    \
  inline void Name(T* p, V value, int order = 0) {                                                                     \
    cuda(p, value, order);                                                                                             \
  }                                                                                                                    \
  template <typename T, typename V>                                                                                    \
  inline T Name##Ret(T* p, V value, int order = 0) {                                                                   \
    return cuda(p, value, order);                                                                                      \
  }
TSN_TL_ATOMIC(AtomicAdd, atomicAdd)
TSN_TL_ATOMIC(AtomicMax, atomicMax)
TSN_TL_ATOMIC(AtomicMin, atomicMin)
#undef TSN_TL_ATOMIC

// Vector forms are atomic per element. The value is a vector, a packed word, or a pointer to elements of either type.
namespace tsn {
namespace sim {
template <typename T, int n, typename V>
inline void elements(const V& value, T (&out)[n]) {
  if constexpr (std::is_pointer<V>::value) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<T>(value[i]);
  } else if constexpr (sizeof(V) == sizeof(out)) {
    memcpy(out, &value, sizeof(out));
  } else {
    static_assert(sizeof(V) == n * sizeof(float), "a vector of the element type or of float");
    float wide[n];
    memcpy(wide, &value, sizeof(wide));
    for (int i = 0; i < n; ++i) out[i] = static_cast<T>(wide[i]);
  }
}
template <int n, typename R, typename T, typename V>
inline R atomic_add_vector(T* p, const V& value, int order) {
  T add[n], old[n];
  elements(value, add);
  for (int i = 0; i < n; ++i) old[i] = atomicAdd(p + i, add[i], order);
  return tsn_bits<R>(old);
}
template <typename T, int n>
struct VectorOf;
#define TSN_VECTOR_OF(T, n, Vector)                                                                                    \
  template <>                                                                                                          \
  struct VectorOf<T, n> {                                                                                              \
    using type = Vector;                                                                                               \
  };
TSN_VECTOR_OF(float, 2, float2)
TSN_VECTOR_OF(float, 4, float4)
TSN_VECTOR_OF(half_t, 2, half2)
TSN_VECTOR_OF(bfloat16_t, 2, __nv_bfloat162)
TSN_VECTOR_OF(half_t, 4, uint2)
TSN_VECTOR_OF(bfloat16_t, 4, uint2)
#undef TSN_VECTOR_OF
} // namespace sim
} // namespace tsn
#define TSN_TL_VECTOR(n)                                                                                               \
  template <typename T, typename V>                                                                                    \
  inline typename tsn::sim::VectorOf<T, n>::type AtomicAddx##n##Ret(T* p, V v, int order = 0) {                        \
    return tsn::sim::atomic_add_vector<n, typename tsn::sim::VectorOf<T, n>::type>(p, v, order);                       \
  }                                                                                                                    \
  template <typename T, typename V>                                                                                    \
  inline void AtomicAddx##n(T* p, V v, int order = 0) {                                                                \
    AtomicAddx##n##Ret(p, v, order);                                                                                   \
  }
TSN_TL_VECTOR(2)
TSN_TL_VECTOR(4)
#undef TSN_TL_VECTOR

template <typename T>
inline T AtomicLoad(T* p, int order = 0) {
  using Word = tsn::WordOf<T>;
  tsn::sim::turn_of_others(); // loads that wait for another thread are atomic
  tsn::sim::visit_word(p, sizeof(T), tsn::sim::WordAccess::read);
  const T value = tsn_bits<T>(__atomic_load_n(reinterpret_cast<const Word*>(p), __ATOMIC_SEQ_CST));
  tsn::sim::Ordering ordering = tsn::sim::device_ordering(order);
  ordering.releases = false;
  tsn::sim::note_local(p, sizeof(T), tsn::sim::LocalAccess::atomic_load, nullptr);
  tsn::sim::word_access(p, sizeof(T), tsn::sim::WordAccess::read, ordering);
  return value;
}
template <typename T, typename V>
inline void AtomicStore(T* p, V value, int order = 0) {
  using Word = tsn::WordOf<T>;
  tsn::sim::maybe_yield();
  tsn::sim::visit_word(p, sizeof(T), tsn::sim::WordAccess::write);
  tsn::sim::Ordering ordering = tsn::sim::device_ordering(order);
  ordering.acquires = false;
  tsn::sim::note_local(p, sizeof(T), tsn::sim::LocalAccess::atomic, nullptr);
  tsn::sim::word_access(p, sizeof(T), tsn::sim::WordAccess::write, ordering,
                        tsn::sim::written(tsn::sim::Written::set, p, static_cast<T>(value)));
  __atomic_store_n(reinterpret_cast<Word*>(p), tsn_bits<Word>(static_cast<T>(value)), __ATOMIC_SEQ_CST);
}
