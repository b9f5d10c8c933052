// The parts of tilelang's device templates that kernels without tensor cores use, for the host.
#pragma once

#include "atomics.h"
#include <algorithm>
#include <limits>
#include <string>

namespace tl {

template <typename T>
inline T shfl_sync(unsigned mask, T v, int lane) {
  return __shfl_sync(mask, v, lane);
}
template <typename T>
inline T shfl_xor_sync(unsigned mask, T v, int lanes) {
  return __shfl_xor_sync(mask, v, lanes);
}
template <typename T>
inline T shfl_down_sync(unsigned mask, T v, int n) {
  return __shfl_down_sync(mask, v, n);
}
template <typename T>
inline T shfl_up_sync(unsigned mask, T v, int n) {
  return __shfl_up_sync(mask, v, n);
}

inline void __sync_thread_partial(int id = 0, int count = 0) { tsn::sim::api().block_barrier(id, count, false); }
inline void __named_barrier_arrive(int id, int count) { tsn::sim::api().block_barrier(id, count, true); }

inline int get_lane_idx(int width = 32) { return static_cast<int>(tsn::sim::self().linear) % (width > 0 ? width : 32); }
inline int get_warp_idx(int width = 32) { return static_cast<int>(tsn::sim::self().linear) / (width > 0 ? width : 32); }
inline int get_warp_idx_sync(int width = 32) { return get_warp_idx(width); }
inline int get_warp_group_idx(int width = 32, int warps = 4) { return get_warp_idx(width) / (warps > 0 ? warps : 4); }

template <typename T>
inline T fast_max(T a, T b) {
  return ::max(a, b);
}
template <typename T>
inline T fast_min(T a, T b) {
  return ::min(a, b);
}
template <typename T>
inline T max(T a, T b) {
  return ::max(a, b);
}
template <typename T>
inline T min(T a, T b) {
  return ::min(a, b);
}
template <typename T>
inline bool is_nan(T x) {
  return static_cast<float>(x) != static_cast<float>(x);
}
// A NaN wins.
template <typename T>
inline T max_nan(T a, T b) {
  return is_nan(a) ? a : is_nan(b) ? b : ::max(a, b);
}
template <typename T>
inline T min_nan(T a, T b) {
  return is_nan(a) ? a : is_nan(b) ? b : ::min(a, b);
}
template <typename T>
inline T clamp(T x, T low, T high) {
  return min_nan(max_nan(x, low), high);
}

inline float fast_rcp(float x) { return 1.0f / x; }
inline float RoundTiesAwayFromZero(float x) { return ::roundf(x); }
inline double RoundTiesAwayFromZero(double x) { return ::round(x); }
template <typename T>
inline T RoundTiesAwayFromZero(T x) {
  return T(::roundf(static_cast<float>(x)));
}
template <int power = 1, typename T>
inline T pow_of_int(T x) {
  T result = x;
  for (int i = 1; i < power; ++i) result = result * x;
  return result;
}
template <typename T>
inline bool Any(T* values, int n) {
  for (int i = 0; i < n; ++i)
    if (values[i]) return true;
  return false;
}
template <typename T>
inline bool All(T* values, int n) {
  for (int i = 0; i < n; ++i)
    if (!values[i]) return false;
  return true;
}

// Arithmetic on pairs, element by element.
template <typename P>
struct PairOf;
template <>
struct PairOf<float2> {
  using element = float;
};
template <>
struct PairOf<__half2> {
  using element = half_t;
};
template <>
struct PairOf<__nv_bfloat162> {
  using element = bfloat16_t;
};
template <typename P, typename F>
inline P each(F f, P a) {
  return {f(typename PairOf<P>::element(a.x)), f(typename PairOf<P>::element(a.y))};
}
template <typename P, typename F>
inline P each(F f, P a, P b) {
  using E = typename PairOf<P>::element;
  return {f(E(a.x), E(b.x)), f(E(a.y), E(b.y))};
}
#define TSN_PAIR(name, expression)                                                                                     \
  template <typename P>                                                                                                \
  inline P name(P p, P q) {                                                                                            \
    using E = typename PairOf<P>::element;                                                                             \
    return each([](E a, E b) -> E { return expression; }, p, q);                                                       \
  }
TSN_PAIR(add2, a + b)
TSN_PAIR(sub2, a - b)
TSN_PAIR(mul2, a* b)
TSN_PAIR(max2, ::max(a, b))
TSN_PAIR(min2, ::min(a, b))
TSN_PAIR(max2_nan, max_nan(a, b))
TSN_PAIR(min2_nan, min_nan(a, b))
#undef TSN_PAIR
template <typename P>
inline P abs2(P p) {
  using E = typename PairOf<P>::element;
  return each([](E a) -> E { return E(::fabsf(static_cast<float>(a))); }, p);
}
template <typename P>
inline P fma2(P p, P q, P r) {
  using E = typename PairOf<P>::element;
  const auto fma1 = [](E a, E b, E c) {
    return E(::fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
  };
  return {fma1(E(p.x), E(q.x), E(r.x)), fma1(E(p.y), E(q.y), E(r.y))};
}

// Reductions over a group of threads.
#define TSN_REDUCER(Name, expression)                                                                                  \
  struct Name {                                                                                                        \
    template <typename T>                                                                                              \
    T operator()(T const& a, T const& b) const {                                                                       \
      return expression;                                                                                               \
    }                                                                                                                  \
  };
TSN_REDUCER(SumOp, a + b)
TSN_REDUCER(MaxOp, ::max(a, b))
TSN_REDUCER(MinOp, ::min(a, b))
TSN_REDUCER(MaxOpNan, max_nan(a, b))
TSN_REDUCER(MinOpNan, min_nan(a, b))
TSN_REDUCER(BitAndOp, a& b)
TSN_REDUCER(BitOrOp, a | b)
TSN_REDUCER(BitXorOp, a ^ b)
#define TSN_PAIR_REDUCER(Name, P, function) TSN_REDUCER(Name, to_uint1(function(from_uint1<P>(a), from_uint1<P>(b))))
TSN_PAIR_REDUCER(SumOp_bf16x2, __nv_bfloat162, add2)
TSN_PAIR_REDUCER(MaxOp_bf16x2, __nv_bfloat162, max2)
TSN_PAIR_REDUCER(MinOp_bf16x2, __nv_bfloat162, min2)
TSN_PAIR_REDUCER(MaxOpNan_bf16x2, __nv_bfloat162, max2_nan)
TSN_PAIR_REDUCER(MinOpNan_bf16x2, __nv_bfloat162, min2_nan)
TSN_PAIR_REDUCER(SumOp_fp16x2, __half2, add2)
TSN_PAIR_REDUCER(MaxOp_fp16x2, __half2, max2)
TSN_PAIR_REDUCER(MinOp_fp16x2, __half2, min2)
TSN_PAIR_REDUCER(MaxOpNan_fp16x2, __half2, max2_nan)
TSN_PAIR_REDUCER(MinOpNan_fp16x2, __half2, min2_nan)
TSN_REDUCER(SumOp_f32x2, add2(a, b))
TSN_REDUCER(MaxOp_f32x2, max2(a, b))
TSN_REDUCER(MinOp_f32x2, min2(a, b))
#undef TSN_PAIR_REDUCER
#undef TSN_REDUCER

struct SyncThreadsBarrier {
  template <int phase = 0>
  static void sync() {
    __syncthreads();
  }
};
template <int count>
struct NamedBarrier {
  template <int phase = 1>
  static void sync() {
    __sync_thread_partial(phase, count);
  }
};

// Accesses by a pointer, visible to the race detector.
template <typename T>
inline T tsn_load(const T* p) {
  tsn::sim::note_load(p, sizeof(T), "a tile", p);
  return *p;
}
template <typename T>
inline void tsn_store(T* p, T value) {
  tsn::sim::note_store(p, sizeof(T), "a tile", p);
  *p = value;
}

// Reduces over threads whose indices differ in the bits scale … threads/2; every thread gets the result. Pairs that are
// 32 or more apart meet in shared memory, the others by shuffles; the order of additions is that of the GPU.
template <class Reducer, int threads, int scale, int first_thread = 0, class Barrier = SyncThreadsBarrier,
          int batch = 1, int stride = 0>
struct AllReduce {
  template <typename T>
  static T run(T value, T* workspace = nullptr) {
    reduce<1>(&value, workspace);
    return value;
  }
  template <typename T>
  static void run_batch(T* values, T* workspace = nullptr) {
    reduce<batch>(values, workspace);
  }

private:
  template <int n, typename T>
  static void reduce(T* values, T* workspace) {
    for (int distance = threads / 2; distance >= scale; distance /= 2) {
      if (distance < 32) {
        for (int i = 0; i < n; ++i) values[i] = Reducer()(values[i], shfl_xor_sync(0xffffffffu, values[i], distance));
        continue;
      }
      const unsigned self = threadIdx.x - first_thread;
      Barrier::template sync<1>();
      for (int i = 0; i < n; ++i) tsn_store(workspace + self + i * stride, values[i]);
      Barrier::template sync<2>();
      for (int i = 0; i < n; ++i)
        values[i] = Reducer()(values[i], tsn_load(workspace + (self ^ distance) + i * stride));
    }
  }
};

template <typename T, typename F>
inline T warp_reduce(T value, F f) {
  for (int distance = 16; distance; distance /= 2) value = f(value, shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}
#define TSN_WARP_REDUCE(name, Op)                                                                                      \
  template <typename T>                                                                                                \
  inline T name(T v) {                                                                                                 \
    return warp_reduce(v, Op());                                                                                       \
  }
TSN_WARP_REDUCE(warp_reduce_sum, SumOp)
TSN_WARP_REDUCE(warp_reduce_max, MaxOp)
TSN_WARP_REDUCE(warp_reduce_min, MinOp)
TSN_WARP_REDUCE(warp_reduce_bitand, BitAndOp)
TSN_WARP_REDUCE(warp_reduce_bitor, BitOrOp)
#undef TSN_WARP_REDUCE

// Inclusive scans of lines by one warp (`Segment` lanes) each.
struct ScanSumOp : SumOp {
  template <typename T>
  static T identity() {
    return T(0);
  }
};
struct ScanMaxOp : MaxOp {
  template <typename T>
  static T identity() {
    if constexpr (std::is_integral<T>::value) return std::numeric_limits<T>::lowest();
    else return T(-std::numeric_limits<float>::infinity());
  }
};
template <class Reducer, bool reverse, int Segment, typename T>
inline void scan_line(const T* in, T* out, int n, int in_stride, int out_stride) {
  const int lane = static_cast<int>(threadIdx.x) % Segment;
  T carry = Reducer::template identity<T>();
  for (int done = 0; done < n; done += Segment) {
    const int index = done + lane, i = reverse ? n - 1 - index : index;
    T value = index < n ? tsn_load(in + i * in_stride) : Reducer::template identity<T>();
    for (int distance = 1; distance < Segment; distance *= 2) {
      const T other = shfl_up_sync(0xffffffffu, value, distance);
      if (lane >= distance) value = Reducer()(other, value);
    }
    value = Reducer()(carry, value);
    if (index < n) tsn_store(out + i * out_stride, value);
    carry = shfl_sync(0xffffffffu, value, Segment - 1);
  }
}
template <class Reducer, int threads, bool reverse = false>
struct InclusiveScan1D {
  template <typename T, int Segment = 32>
  static void run(const T* in, T* out, int n) {
    if (threadIdx.x < Segment) scan_line<Reducer, reverse, Segment>(in, out, n, 1, 1);
  }
};
template <class Reducer, int threads, int axis = 0, bool reverse = false>
struct InclusiveScan2D {
  template <typename T, int Segment = 32>
  static void run(const T* in, T* out, int height, int width, int in_stride, int out_stride) {
    const int lines = axis ? height : width;
    for (int line = static_cast<int>(threadIdx.x) / Segment; line < lines; line += threads / Segment)
      if (axis) scan_line<Reducer, reverse, Segment>(in + line * in_stride, out + line * out_stride, width, 1, 1);
      else scan_line<Reducer, reverse, Segment>(in + line, out + line, height, in_stride, out_stride);
  }
};
template <int threads, bool reverse = false>
struct CumSum1D : InclusiveScan1D<ScanSumOp, threads, reverse> {};
template <int threads, int axis = 0, bool reverse = false>
struct CumSum2D : InclusiveScan2D<ScanSumOp, threads, axis, reverse> {};
template <int threads, bool reverse = false>
struct CumMax1D : InclusiveScan1D<ScanMaxOp, threads, reverse> {};
template <int threads, int axis = 0, bool reverse = false>
struct CumMax2D : InclusiveScan2D<ScanMaxOp, threads, axis, reverse> {};

inline unsigned ceil_div(unsigned a, unsigned b) { return (a + b - 1) / b; }

// Block index for a grid walked in panels of `width` rows (or columns), every other panel backwards.
template <int width>
inline dim3 rasterize(unsigned along, unsigned across) {
  const unsigned block = blockIdx.x + blockIdx.y * gridDim.x, grid = gridDim.x * gridDim.y;
  const unsigned panel = block / (width * along), offset = block % (width * along);
  const unsigned rows = panel + 1 < ceil_div(grid, width * along) ? width : (grid - panel * width * along) / along;
  const unsigned a = panel & 1 ? along - 1 - offset / rows : offset / rows;
  (void)across;
  return {a, offset % rows + panel * width, blockIdx.z};
}
template <int width>
inline dim3 rasterization2DRow() {
  return rasterize<width>(gridDim.x, gridDim.y);
}
template <int width>
inline dim3 rasterization2DColumn() {
  const dim3 p = rasterize<width>(gridDim.y, gridDim.x);
  return {p.y, p.x, p.z};
}

// 256-bit accesses to global memory.
template <typename T>
inline T load_global_256(const T* p) {
  return *p;
}
template <typename T, typename V>
inline void store_global_256(T* p, V value) {
  *p = value;
}

} // namespace tl

// Printing and assertions.
inline void tsn_print_value(const char* message, const char* label, double value) {
  tsn_print("%s [block %u,%u,%u thread %u,%u,%u] %s%.9g", message, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z, label, value);
}
template <typename T>
inline void debug_print_var(const char* message, T value) {
  if constexpr (std::is_pointer<T>::value) tsn_print("%s %p", message, static_cast<const void*>(value));
  else if constexpr (std::is_integral<T>::value) tsn_print_value(message, "", static_cast<double>(value));
  else tsn_print_value(message, "", static_cast<float>(value));
}
template <typename T>
inline void debug_print_buffer_value(const char* message, const char* name, int i, T value) {
  char label[96];
  snprintf(label, sizeof(label), "%s[%d] = ", name, i);
  tsn_print_value(message, label, static_cast<double>(static_cast<float>(value)));
}
inline void debug_print_msg(const char* message) {
  tsn_print("%s [block %u,%u,%u thread %u,%u,%u]", message, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z);
}
inline void device_assert_with_msg(bool condition, const char* message) {
  if (condition) return;
  std::string text = message; // between empty lines; it names the author's line
  if (!text.empty()) tsn::sim::self().site = -1;
  text.erase(0, std::min(text.find_first_not_of(" \n"), text.size()));
  text.erase(text.find_last_not_of(" \n") + 1);
  tsn::sim::api().trap(("a device-side assertion failed" + (text.empty() ? text : ": " + text)).c_str());
}
inline void device_assert(bool condition) { device_assert_with_msg(condition, ""); }

// -------------------------------------------------------------------------------------------------- mbarriers

// T.alloc_barrier: threads arrive, and wait until as many have as the barrier was made for.
// Named as in tilelang's generated code. As in PTX an arrival releases, and a wait acquires. Bit 63: parity of the
// running phase; then arrivals of a phase; then those still to come, 20 bits.
class Barrier {
public:
  void init(uint32_t arrivals) { word = uint64_t(arrivals) << 20 | arrivals; }
  void arrive() {
    tsn::sim::word_access(&word, 0, tsn::sim::WordAccess::write, {false, true, kBlockScope});
    --word;
    const bool ends = (word & kLeft) == 0;
    if (ends) word = (word ^ kParity) | (word >> 20 & kLeft);
    // The end of a phase counts as progress: see Grid::stands_at_mbarriers.
    if (ends && !tsn::sim::self().scheduled) tsn::sim::api().yield(false);
    else tsn::sim::maybe_yield();
  }
  // Until the phase of this parity has ended; at once if the first phase is running, with the other parity.
  void wait(uint32_t parity) {
    tsn::sim::Thread& self = tsn::sim::self();
    for (; (word >> 63) == (parity & 1); tsn::sim::api().yield(true)) self.at_mbarrier = true;
    self.at_mbarrier = false;
    tsn::sim::word_access(&word, 0, tsn::sim::WordAccess::read, {true, false, kBlockScope});
  }

private:
  static constexpr uint32_t kBlockScope = uint32_t(tsn::MemScope::cta);
  static constexpr uint64_t kParity = uint64_t(1) << 63, kLeft = (1 << 20) - 1;

  uint64_t word;
};

namespace tl {

template <int threads>
inline bool tl_shuffle_elect() {
  return tsn::sim::self().linear % (threads > 0 ? threads : 0x40000000) == 0;
}
inline void fence_barrier_init() {}

} // namespace tl
