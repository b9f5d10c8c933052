// CUDA's built-in variables and functions for a kernel whose threads are fibers.
#pragma once

#include <math.h>
#include <math_constants.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <type_traits>

#include "../types.h"
#include "numbers.h"
#include "thread.h"

#define threadIdx (tsn::sim::self().thread_idx)
#define blockIdx (tsn::sim::self().block_idx)
#define blockDim (tsn::sim::self().block_dim)
#define gridDim (tsn::sim::self().grid_dim)
constexpr int warpSize = 32;

// Barriers and fences. Fibers of one grid share an operating-system thread, so fences matter only towards other ranks,
// and to the race detector.
inline void __syncthreads() { tsn::sim::api().block_barrier(0, 0, false); }
inline int __syncthreads_count(int p) {
  return static_cast<int>(tsn::sim::api().block_vote(tsn::sim::VoteOp::count, p != 0));
}
inline int __syncthreads_and(int p) {
  return static_cast<int>(tsn::sim::api().block_vote(tsn::sim::VoteOp::all, p != 0));
}
inline int __syncthreads_or(int p) {
  return static_cast<int>(tsn::sim::api().block_vote(tsn::sim::VoteOp::any, p != 0));
}
inline void tsn_fence(tsn::MemScope scope) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  tsn::sim::fenced(static_cast<uint32_t>(scope), true); // CUDA's are sequentially consistent
}
inline void __threadfence_block() { tsn_fence(tsn::MemScope::cta); }
inline void __threadfence() { tsn_fence(tsn::MemScope::gpu); }
inline void __threadfence_system() { tsn_fence(tsn::MemScope::sys); }
inline void __nanosleep(unsigned) { tsn::sim::api().yield(true); }
[[noreturn]] inline void __trap() {
  tsn::sim::api().trap("__trap() was called");
  __builtin_unreachable();
}
inline long long clock64() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
inline unsigned long long __globaltimer() { return static_cast<unsigned long long>(clock64()); }
inline long clock() { return static_cast<long>(clock64()); }

// Warp operations.
inline uint64_t tsn_warp(tsn::sim::WarpOp op, unsigned mask, uint64_t value, unsigned argument) {
  return tsn::sim::api().warp(op, mask, value, argument);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { tsn_warp(tsn::sim::WarpOp::sync, mask, 0, 0); }
// Lanes that wait here, at the same program location, count as converged.
__attribute__((noinline)) inline unsigned __activemask() {
  return tsn::sim::api().active_mask(__builtin_return_address(0));
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return static_cast<unsigned>(tsn_warp(tsn::sim::WarpOp::ballot, mask, p != 0, 0));
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }

template <typename T>
inline uint64_t tsn_to_word(T value) {
  static_assert(sizeof(T) <= 8, "warp operations carry at most 8 bytes");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
inline T tsn_from_word(uint64_t word) {
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}
template <typename T>
inline T tsn_shuffle(unsigned mask, T value, unsigned source) {
  return tsn_from_word<T>(tsn_warp(tsn::sim::WarpOp::shuffle, mask, tsn_to_word(value), source));
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = static_cast<int>(tsn::sim::self().lane);
  return tsn_shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int lane = static_cast<int>(tsn::sim::self().lane), other = lane ^ lanes;
  return tsn_shuffle(mask, value, (other & ~(width - 1)) > (lane | (width - 1)) ? lane : other);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = static_cast<int>(tsn::sim::self().lane), other = lane + static_cast<int>(delta);
  return tsn_shuffle(mask, value, other > (lane | (width - 1)) ? lane : other);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = static_cast<int>(tsn::sim::self().lane), other = lane - static_cast<int>(delta);
  return tsn_shuffle(mask, value, other < (lane & ~(width - 1)) ? lane : other);
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  return static_cast<unsigned>(tsn_warp(tsn::sim::WarpOp::match_any, mask, tsn_to_word(value), 0));
}
template <typename T>
inline unsigned __match_all_sync(unsigned mask, T value, int* predicate) {
  const unsigned same = static_cast<unsigned>(tsn_warp(tsn::sim::WarpOp::match_all, mask, tsn_to_word(value), 0));
  *predicate = same != 0;
  return same;
}
template <typename T, typename F>
inline T tsn_warp_reduce(unsigned mask, T value, F f) {
  T result = value;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) {
      const T other = tsn_shuffle(mask, value, lane);
      if (lane != tsn::sim::self().lane) result = f(result, other);
    }
  return result;
}
#define TSN_REDUCE(name, T, expression)                                                                                \
  inline T __reduce_##name##_sync(unsigned mask, T v) {                                                                \
    return tsn_warp_reduce(mask, v, [](T a, T b) { return static_cast<T>(expression); });                              \
  }
#define TSN_REDUCE_BOTH(name, expression) TSN_REDUCE(name, int, expression) TSN_REDUCE(name, unsigned, expression)
TSN_REDUCE_BOTH(add, static_cast<unsigned>(a) + static_cast<unsigned>(b))
TSN_REDUCE_BOTH(max, a > b ? a : b)
TSN_REDUCE_BOTH(min, a < b ? a : b)
TSN_REDUCE(and, unsigned, a& b)
TSN_REDUCE(or, unsigned, a | b)
TSN_REDUCE(xor, unsigned, a ^ b)
#undef TSN_REDUCE_BOTH
#undef TSN_REDUCE

// Loads and stores with cache hints are plain ones.
#define TSN_LOAD(name)                                                                                                 \
  template <typename T>                                                                                                \
  inline T name(const T* p) {                                                                                          \
    tsn::sim::note_load(p, sizeof(T), "memory by " #name);                                                             \
    return *p;                                                                                                         \
  }
#define TSN_STORE(name)                                                                                                \
  template <typename T>                                                                                                \
  inline void name(T* p, T v) {                                                                                        \
    tsn::sim::note_store(p, sizeof(T), "memory by " #name);                                                            \
    *p = v;                                                                                                            \
  }
TSN_LOAD(__ldcg)
TSN_LOAD(__ldca)
TSN_LOAD(__ldcs)
TSN_LOAD(__ldcv)
TSN_STORE(__stcg)
TSN_STORE(__stcs)
TSN_STORE(__stwt)
#undef TSN_LOAD
#undef TSN_STORE
// The read-only cache may hold values from before a peer's write.
template <typename T>
inline T __ldg(const T* p) {
  if (tsn::sim::in_symmetric_heap(p))
    tsn::sim::api().trap("__ldg of symmetric memory: the read-only cache may hold data from before a peer's write; "
                         "load it plainly, or with N.ld");
  tsn::sim::note_load(p, sizeof(T), "memory by __ldg");
  return *p;
}

// Integer and bit functions.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return c;
}

// Mathematics; the fast variants are as exact as the others here.
#define TSN_MATH1(name, function)                                                                                      \
  inline float name(float x) { return function(x); }
TSN_MATH1(__expf, ::expf)
TSN_MATH1(__logf, ::logf)
TSN_MATH1(__log2f, ::log2f)
TSN_MATH1(__log10f, ::log10f)
TSN_MATH1(__sinf, ::sinf)
TSN_MATH1(__cosf, ::cosf)
TSN_MATH1(__tanf, ::tanf)
TSN_MATH1(__tanhf, ::tanhf)
TSN_MATH1(__exp10f, ::exp10f)
TSN_MATH1(__fsqrt_rn, ::sqrtf)
TSN_MATH1(__saturatef, [](float v) { return ::fminf(::fmaxf(v, 0.0f), 1.0f); })
#undef TSN_MATH1
inline float rsqrtf(float x) { return 1.0f / ::sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __powf(float a, float b) { return ::powf(a, b); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __int_as_float(int x) { return tsn_bits<float>(x); }
inline int __float_as_int(float x) { return tsn_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return tsn_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return tsn_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return tsn_bits<double>(x); }
inline long long __double_as_longlong(double x) { return tsn_bits<long long>(x); }

// max and min of mixed integers, and of floats as fmax and fmin (a NaN loses).
template <typename A, typename B>
using tsn_common = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                                    typename std::common_type<A, B>::type>;
template <typename A, typename B>
inline tsn_common<A, B> max(A a, B b) {
  using T = tsn_common<A, B>;
  if constexpr (std::is_floating_point<T>::value) return ::fmax(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
inline tsn_common<A, B> min(A a, B b) {
  using T = tsn_common<A, B>;
  if constexpr (std::is_floating_point<T>::value) return ::fmin(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

// The same for 16-bit and 8-bit numbers; tilelang calls 16-bit mathematics h<name>.
#define TSN_NARROW(T)                                                                                                  \
  inline T max(T a, T b) { return a < b || static_cast<float>(a) != static_cast<float>(a) ? b : a; }                   \
  inline T min(T a, T b) { return b < a || static_cast<float>(a) != static_cast<float>(a) ? b : a; }
TSN_NARROW(half_t)
TSN_NARROW(bfloat16_t)
TSN_NARROW(fp8_e4_t)
TSN_NARROW(fp8_e5_t)
#undef TSN_NARROW
#define TSN_HALF1(name, expression)                                                                                    \
  inline half_t name(half_t v) {                                                                                       \
    const float x = static_cast<float>(v);                                                                             \
    return half_t(expression);                                                                                         \
  }                                                                                                                    \
  inline bfloat16_t name(bfloat16_t v) {                                                                               \
    const float x = static_cast<float>(v);                                                                             \
    return bfloat16_t(expression);                                                                                     \
  }
TSN_HALF1(__habs, ::fabsf(x))
TSN_HALF1(hsqrt, ::sqrtf(x))
TSN_HALF1(hrsqrt, 1.0f / ::sqrtf(x))
TSN_HALF1(hrcp, 1.0f / x)
TSN_HALF1(hexp, ::expf(x))
TSN_HALF1(hexp2, ::exp2f(x))
TSN_HALF1(hexp10, ::exp10f(x))
TSN_HALF1(hlog, ::logf(x))
TSN_HALF1(hlog2, ::log2f(x))
TSN_HALF1(hlog10, ::log10f(x))
TSN_HALF1(hsin, ::sinf(x))
TSN_HALF1(hcos, ::cosf(x))
TSN_HALF1(htan, ::tanf(x))
TSN_HALF1(hatan, ::atanf(x))
TSN_HALF1(hsinh, ::sinhf(x))
TSN_HALF1(hcosh, ::coshf(x))
TSN_HALF1(htanh, ::tanhf(x))
TSN_HALF1(herf, ::erff(x))
TSN_HALF1(hfloor, ::floorf(x))
TSN_HALF1(hceil, ::ceilf(x))
TSN_HALF1(hrint, ::rintf(x))
TSN_HALF1(hnearbyint, ::nearbyintf(x))
TSN_HALF1(htrunc, ::truncf(x))
#undef TSN_HALF1
#define TSN_HALF2(name, expression)                                                                                    \
  inline half_t name(half_t u, half_t v) {                                                                             \
    const float a = static_cast<float>(u), b = static_cast<float>(v);                                                  \
    return half_t(expression);                                                                                         \
  }                                                                                                                    \
  inline bfloat16_t name(bfloat16_t u, bfloat16_t v) {                                                                 \
    const float a = static_cast<float>(u), b = static_cast<float>(v);                                                  \
    return bfloat16_t(expression);                                                                                     \
  }
TSN_HALF2(__hadd_rn, a + b)
TSN_HALF2(__hsub_rn, a - b)
TSN_HALF2(__hmul_rn, a* b)
TSN_HALF2(__hdiv, a / b)
TSN_HALF2(hpow, ::powf(a, b))
TSN_HALF2(hfmod, ::fmodf(a, b))
#undef TSN_HALF2
inline half_t __hfma(half_t a, half_t b, half_t c) {
  return half_t(::fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}
inline bfloat16_t __hfma(bfloat16_t a, bfloat16_t b, bfloat16_t c) {
  return bfloat16_t(::fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}

// Output goes through the simulator, so that lines of ranks and threads do not mix.
inline void tsn_print(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  tsn::sim::api().print(text);
}

namespace cooperative_groups {
struct grid_group {
  void sync() const { tsn::sim::api().grid_barrier(); }
};
inline grid_group this_grid() { return {}; }
} // namespace cooperative_groups
