// The number types of generated kernels on the host: CUDA's own 16-bit and 8-bit formats behind the names that tilelang
// uses. Arithmetic is done in float and rounded once, like the hardware's scalar instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math.h>
#include <string.h>
#include <type_traits>

#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
using int4_t = int4;

#define TSN_OPERATOR(Number, op, R)                                                                                    \
  friend R operator op(Number a, Number b) { return R(static_cast<float>(a.raw) op static_cast<float>(b.raw)); }
// clang-format off
#define TSN_OPERATORS(N)                                                                                               \
  TSN_OPERATOR(N, +, N) TSN_OPERATOR(N, -, N) TSN_OPERATOR(N, *, N) TSN_OPERATOR(N, /, N)                              \
  TSN_OPERATOR(N, <, bool) TSN_OPERATOR(N, >, bool) TSN_OPERATOR(N, <=, bool) TSN_OPERATOR(N, >=, bool)                \
  TSN_OPERATOR(N, ==, bool) TSN_OPERATOR(N, !=, bool)
// clang-format on

namespace cutlass {

// A 16-bit number stored as CUDA's type `Raw`.
template <typename Raw>
struct Number16 {
  Raw raw;

  Number16() = default;
  Number16(Raw x) : raw(x) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit Number16(T x) : raw(static_cast<float>(x)) {}
  template <typename Other>
  explicit Number16(Number16<Other> x) : raw(static_cast<float>(x)) {}

  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit operator T() const {
    return static_cast<T>(static_cast<float>(raw));
  }
  operator Raw() const { return raw; }
  Raw to_half() const { return raw; }
  Raw to_nv_bfloat16() const { return raw; }

  Number16 operator-() const { return Number16(-static_cast<float>(raw)); }
  Number16& operator+=(Number16 b) { return *this = *this + b; }
  Number16& operator-=(Number16 b) { return *this = *this - b; }
  Number16& operator*=(Number16 b) { return *this = *this * b; }
  Number16& operator/=(Number16 b) { return *this = *this / b; }

  TSN_OPERATORS(Number16)
};

using half_t = Number16<__half>;
using bfloat16_t = Number16<__nv_bfloat16>;

} // namespace cutlass

using cutlass::bfloat16_t;
using cutlass::half_t;

namespace tl {

// An 8-bit float stored as CUDA's type `Raw`; conversions to it saturate.
template <typename Raw>
struct Number8 {
  Raw raw;

  Number8() = default;
  Number8(Raw x) : raw(x) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit Number8(T x) : raw(static_cast<float>(x)) {}
  explicit Number8(__half x) : raw(x) {}
  explicit Number8(__nv_bfloat16 x) : raw(x) {}
  template <typename Other>
  explicit Number8(cutlass::Number16<Other> x) : raw(x.raw) {}
  template <typename Other>
  explicit Number8(Number8<Other> x) : raw(static_cast<float>(x)) {}

  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit operator T() const {
    return static_cast<T>(static_cast<float>(raw));
  }
  template <typename Other>
  explicit operator cutlass::Number16<Other>() const {
    return cutlass::Number16<Other>(static_cast<float>(raw));
  }

  Number8 operator-() const { return Number8(-static_cast<float>(raw)); }

  TSN_OPERATORS(Number8)
};

using float_e4m3_t = Number8<__nv_fp8_e4m3>;
using float_e5m2_t = Number8<__nv_fp8_e5m2>;

} // namespace tl

#undef TSN_OPERATORS
#undef TSN_OPERATOR

using fp8_e4_t = tl::float_e4m3_t;
using fp8_e5_t = tl::float_e5m2_t;
using fp8_e8_t = __nv_fp8_e8m0;

template <typename Vector, typename Element, typename... Values>
inline Vector tsn_vector_of(Values... values) {
  const Element elements[] = {static_cast<Element>(values)...};
  static_assert(sizeof(elements) == sizeof(Vector), "a vector takes all of its elements");
  Vector vector;
  memcpy(&vector, elements, sizeof(Vector));
  return vector;
}

#define TSN_FP8_MAKE(name, n)                                                                                          \
  template <typename... Values>                                                                                        \
  inline name##_##n##_t make_##name##_##n##_t(Values... values) {                                                      \
    return tsn_vector_of<name##_##n##_t, name##_t>(values...);                                                         \
  }
#define TSN_FP8_VECTORS(name)                                                                                          \
  struct alignas(2) name##_2_t {                                                                                       \
    name##_t x, y;                                                                                                     \
  };                                                                                                                   \
  struct alignas(4) name##_4_t {                                                                                       \
    name##_t x, y, z, w;                                                                                               \
  };                                                                                                                   \
  struct alignas(8) name##_8_t {                                                                                       \
    name##_4_t x, y;                                                                                                   \
  };                                                                                                                   \
  struct alignas(16) name##_16_t {                                                                                     \
    name##_8_t x, y;                                                                                                   \
  };                                                                                                                   \
  struct alignas(32) name##_32_t {                                                                                     \
    name##_16_t x, y;                                                                                                  \
  };                                                                                                                   \
  TSN_FP8_MAKE(name, 2)                                                                                                \
  TSN_FP8_MAKE(name, 4)                                                                                                \
  TSN_FP8_MAKE(name, 8)                                                                                                \
  TSN_FP8_MAKE(name, 16)                                                                                               \
  TSN_FP8_MAKE(name, 32)
TSN_FP8_VECTORS(fp8_e4)
TSN_FP8_VECTORS(fp8_e5)
TSN_FP8_VECTORS(fp8_e8)
#undef TSN_FP8_VECTORS
#undef TSN_FP8_MAKE

// The same bits as another type of the same size.
template <typename To, typename From>
inline To tsn_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "reinterpretation keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Conversions between fp8 pairs and 16-bit pairs, under tilelang's names.
inline float2 __tl_cvt_fp8x2_to_float2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(x, kind)));
}
inline half2 __tl_cvt_fp8x2_to_half2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  return half2(__nv_cvt_fp8x2_to_halfraw2(x, kind));
}
inline __nv_fp8x2_storage_t __tl_cvt_half2_to_fp8x2(half2 x, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(x), __NV_SATFINITE, kind);
}
inline half __tl_cvt_fp8_to_half(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
  return half(__nv_cvt_fp8_to_halfraw(x, kind));
}
inline __nv_fp8_storage_t __tl_cvt_half_to_fp8(half x, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_halfraw_to_fp8(static_cast<__half_raw>(x), __NV_SATFINITE, kind);
}
inline __nv_fp8_storage_t __tl_cvt_bfloat16_to_fp8(__nv_bfloat16 x, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_bfloat16raw_to_fp8(static_cast<__nv_bfloat16_raw>(x), __NV_SATFINITE, kind);
}
inline __nv_bfloat16 __tl_cvt_fp8_to_bfloat16(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
  return __float2bfloat16(__half2float(__tl_cvt_fp8_to_half(x, kind)));
}
inline __nv_bfloat162 __tl_cvt_e4m3x2_to_bfloat162(__nv_fp8x2_storage_t x) {
  return __float22bfloat162_rn(__tl_cvt_fp8x2_to_float2(x, __NV_E4M3));
}
inline __nv_bfloat162 __tl_cvt_e5m2x2_to_bfloat162(__nv_fp8x2_storage_t x) {
  return __float22bfloat162_rn(__tl_cvt_fp8x2_to_float2(x, __NV_E5M2));
}
inline __nv_fp8x2_storage_t __tl_cvt_bfloat162_to_fp8x2(__nv_bfloat162 x, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_bfloat16raw2_to_fp8x2(static_cast<__nv_bfloat162_raw>(x), __NV_SATFINITE, kind);
}
inline __nv_bfloat16 __tl_cvt_e8m0_to_bfloat16(__nv_fp8_storage_t x) {
  return __nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(x));
}
inline __nv_bfloat162 __tl_cvt_e8m0x2_to_bfloat162(__nv_fp8x2_storage_t x) {
  return __nv_bfloat162(__nv_cvt_e8m0x2_to_bf162raw(x));
}
inline __nv_fp8_storage_t __tl_cvt_bfloat16_to_e8m0(__nv_bfloat16 x) {
  return __nv_cvt_bfloat16raw_to_e8m0(static_cast<__nv_bfloat16_raw>(x), __NV_SATFINITE, cudaRoundPosInf);
}
inline __nv_fp8x2_storage_t __tl_cvt_bfloat162_to_e8m0x2(__nv_bfloat162 x) {
  return __nv_cvt_bfloat162raw_to_e8m0x2(static_cast<__nv_bfloat162_raw>(x), __NV_SATFINITE, cudaRoundPosInf);
}
inline __nv_fp8_storage_t __tl_cvt_float_to_e8m0(float x) {
  return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf);
}
inline __nv_fp8x2_storage_t __tl_cvt_float2_to_e8m0x2(float2 x) {
  return __nv_cvt_float2_to_e8m0x2(x, __NV_SATFINITE, cudaRoundPosInf);
}

// Packing of narrow values into words, lowest element first.
inline unsigned __pack_half2(half x, half y) { return tsn_bits<unsigned>(half2(x, y)); }
inline unsigned __pack_half2(half_t x, half_t y) { return tsn_bits<unsigned>(half2(x.raw, y.raw)); }
inline unsigned __pack_half2(bfloat16_t x, bfloat16_t y) { return tsn_bits<unsigned>(__nv_bfloat162(x.raw, y.raw)); }
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return __pack_half2(x, y); }

namespace tl {
// A vector from its elements in order.
template <typename V, typename E, typename... Rest>
inline V make_vec(E first, Rest... rest) {
  const E values[] = {first, static_cast<E>(rest)...};
  static_assert(sizeof(values) == sizeof(V), "one element per lane");
  V v;
  memcpy(&v, values, sizeof(V));
  return v;
}
template <typename V, typename Unit>
inline V broadcast(Unit unit) {
  static_assert(sizeof(V) % sizeof(Unit) == 0, "whole units only");
  V v;
  for (size_t i = 0; i < sizeof(V); i += sizeof(Unit)) memcpy(reinterpret_cast<char*>(&v) + i, &unit, sizeof(Unit));
  return v;
}
template <typename T>
inline T from_uint1(uint1 x) {
  return tsn_bits<T>(x);
}
template <typename T>
inline uint1 to_uint1(T x) {
  return tsn_bits<uint1>(x);
}
} // namespace tl

// tilelang packs 8-bit and 16-bit elements with make_<type> overloads of many arguments.
template <typename T>
inline unsigned pack_b8x4(T a, T b, T c, T d) {
  return tl::make_vec<unsigned>(a, b, c, d);
}
inline int make_int(signed char a, signed char b, signed char c, signed char d) {
  return tl::make_vec<int>(a, b, c, d);
}
inline unsigned make_uint(unsigned char a, unsigned char b, unsigned char c, unsigned char d) {
  return tl::make_vec<unsigned>(a, b, c, d);
}
#define TSN_MAKE(fn, V, E, n)                                                                                          \
  template <typename... Rest, typename = std::enable_if_t<sizeof...(Rest) == n - 1>>                                   \
  inline V fn(E first, Rest... r) {                                                                                    \
    return tl::make_vec<V>(first, static_cast<E>(r)...);                                                               \
  }
TSN_MAKE(make_int2, int2, signed char, 8)
TSN_MAKE(make_int4, int4, signed char, 16)
TSN_MAKE(make_int4, int4, short, 8)
TSN_MAKE(make_uint2, uint2, unsigned char, 8)
TSN_MAKE(make_uint4, uint4, unsigned char, 16)
TSN_MAKE(make_uint4, uint4, unsigned short, 8)
#undef TSN_MAKE
