// How an NVIDIA GPU moves data, for platform.h: wide loads and stores, and bulk copies (cp.async.bulk with mbarriers,
// sm_90 and later). Part of platform_cuda.h, which includes it.
#pragma once

namespace tsn {
namespace platform {

// ------------------------------------------------------------------------------------------------- loads and stores
// Predicates are written in PTX, because branches around unrolled accesses would prevent their overlap. Skipped loads
// give 0: a register that keeps its old value would be live through every loop around the copy, and the unrolled rows
// of all copies together would not fit. A constant condition costs nothing.

#define TSN_LOAD_BELOW(type, register, constraint)                                                                     \
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %2, %3; mov." register " %0, 0; "                                       \
                                                                      "@p ld.relaxed.sys.global.L1::no_allocate." type \
                                                                      " %0, [%1]; }"                                   \
               : "=" constraint(w)                                                                                     \
               : "l"(p), "r"(at), "r"(limit)                                                                           \
               : "memory")
#define TSN_STORE_BELOW(type, constraint)                                                                              \
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %2, %3; @p st.relaxed.sys.global." type " [%0], %1; }" ::"l"(p),        \
               constraint(w), "r"(at), "r"(limit)                                                                      \
               : "memory")

template <class T>
TSN_DEVICE void load_data_below(T* v, const T* p, int at, int limit) {
  if constexpr (sizeof(T) == 16) {
    asm volatile("{ .reg .pred p; setp.lt.s32 p, %5, %6; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
                 "@p ld.relaxed.sys.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w)
                 : "l"(p), "r"(at), "r"(limit)
                 : "memory");
  } else {
    detail::Register<T> w;
    if constexpr (sizeof(T) == 1) TSN_LOAD_BELOW("b8", "b16", "h");
    if constexpr (sizeof(T) == 2) TSN_LOAD_BELOW("b16", "b16", "h");
    if constexpr (sizeof(T) == 4) TSN_LOAD_BELOW("b32", "b32", "r");
    if constexpr (sizeof(T) == 8) TSN_LOAD_BELOW("b64", "b64", "l");
    *v = detail::from_word<T>(w);
  }
}

template <class T>
TSN_DEVICE void store_data_below(T* p, T v, int at, int limit) {
  if constexpr (sizeof(T) == 16) {
    asm volatile(
        "{ .reg .pred p; setp.lt.s32 p, %5, %6; @p st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(p),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(at), "r"(limit)
        : "memory");
  } else {
    const auto w = detail::to_word(v);
    if constexpr (sizeof(T) == 1) TSN_STORE_BELOW("b8", "h");
    if constexpr (sizeof(T) == 2) TSN_STORE_BELOW("b16", "h");
    if constexpr (sizeof(T) == 4) TSN_STORE_BELOW("b32", "r");
    if constexpr (sizeof(T) == 8) TSN_STORE_BELOW("b64", "l");
  }
}

#undef TSN_LOAD_BELOW
#undef TSN_STORE_BELOW

template <class T>
TSN_DEVICE T load_data(const T* p) {
  T v;
  load_data_below(&v, p, 0, 1);
  return v;
}

template <class T>
TSN_DEVICE void store_data(T* p, T v) {
  store_data_below(p, v, 0, 1);
}

TSN_DEVICE void store_16b_below(Vec16* p, Vec16 v, int at, int limit) {
  asm volatile("{ .reg .pred yes; setp.lt.s32 yes, %5, %6; .reg .b64 a, b; .reg .b128 q; mov.b64 a, {%1, %2}; "
               "mov.b64 b, {%3, %4}; mov.b128 q, {a, b}; @yes st.relaxed.sys.global.b128 [%0], q; }" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(at), "r"(limit)
               : "memory");
}
TSN_DEVICE void store_16b(Vec16* p, Vec16 v) { store_16b_below(p, v, 0, 1); }

// ------------------------------------------------------------------------------------------------------ bulk copies

template <int Stages>
TSN_DEVICE uint64_t* stage_barriers() {
  __shared__ uint64_t words[Stages];
  return words;
}

namespace detail {
TSN_DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
} // namespace detail

TSN_DEVICE void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(detail::shared_address(barrier)) : "memory");
}

TSN_DEVICE void barrier_retire(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(detail::shared_address(barrier)) : "memory");
}

TSN_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

TSN_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(detail::shared_address(barrier)), "r"(parity)
                 : "memory");
}

TSN_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   detail::shared_address(shared)),
               "l"(global), "r"(bytes), "r"(detail::shared_address(barrier))
               : "memory");
}

TSN_DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(detail::shared_address(shared)), "r"(bytes)
               : "memory");
}

TSN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
TSN_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
TSN_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Between the generic proxy (loads and stores of threads) and the async proxy (bulk copies). The fence of all spaces at
// once would become a fence at GPU scope, which takes 0.25 us on an H200.
TSN_DEVICE void bulk_publish() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
TSN_DEVICE void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------- deferral
// Declared for the discarded branches that name them.
bool defer_put(const Context*, void*, void*, const void*, int64_t, int);
bool defer_put_signal(const Context*, void*, void*, const void*, int64_t, int, uint64_t*, uint64_t*, uint64_t,
                      SignalOp);
bool defer_put_rows(const Context*, void*, void*, const void*, int64_t, int64_t, int64_t, int64_t, int, uint64_t*,
                    uint64_t*, uint64_t, SignalOp);
bool defer_put_value(const Context*, void*, void*, uint64_t, int, int);
bool defer_signal(const Context*, uint64_t*, uint64_t*, uint64_t, SignalOp, int);
template <class T>
bool defer_atomic(const Context*, AtomicOp, T*, T*, T, int, T*);
template <class T>
bool defer_atomic_cas(const Context*, T*, T*, T, T, int, T*);
void reach(const void*, bool);
bool defer_fence(const Context*, int);
bool defer_quiet(const Context*, int);
void flushed(uint64_t ticket, bool ended);
void announce(Operation, Scope, const void*, const void*, int64_t, int, const uint64_t*, uint64_t, SignalOp, int64_t,
              int64_t, int64_t);
void begin(Operation, Scope, const void*, const void*, int64_t, int, const uint64_t*, uint64_t, SignalOp, int64_t,
           int64_t, int64_t);
void waited(const uint64_t*);
void benign_race(const void*, int64_t);
void expect_empty(const Vec16*);
void signalling(const uint64_t*, int, uint64_t, SignalOp);
void wait_begins(Operation, int, const uint64_t*, uint64_t, uint32_t);
bool waits_without_a_look();
void wait_ends();
void gives_up();
uint32_t line();
void range_begins();
void range_ends();
template <Order>
void before_ld();
template <Order O, MemScope S>
void after_ld(const void*);
template <Order O, MemScope S, class T>
void before_st(const void*, T);
void inspect(Operation, const void*, int64_t);

} // namespace platform
} // namespace tsn
