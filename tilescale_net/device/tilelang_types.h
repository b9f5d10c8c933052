// The names of tilelang's templates for this package's kernels that only move and add data.
//
// tilelang's own headers include CUTLASS and libcu++, which take nvcc longer than the kernel. Generated code that
// uses nothing else is compiled with this header instead, see compiler/shipped.py. Types have only the operations
// that such code uses, so other code does not compile with it.
#pragma once

#include <stdint.h>

#ifdef TSN_HAS_BFLOAT16
#include <cuda_bf16.h>
#include <cutlass/bfloat16.h>
using cutlass::bfloat16_t;

__device__ __forceinline__ unsigned int __pack_nv_bfloat162(const bfloat16_t low, const bfloat16_t high) {
  return static_cast<unsigned int>(high.raw()) << 16 | low.raw();
}
#endif

#ifdef TSN_HAS_FP8
#include <cuda_fp8.h>

namespace tsn {
namespace detail {

// Copied as one word, whatever its type.
template <typename Word>
struct Fp8Vector {
  Word word;
};

} // namespace detail
} // namespace tsn

using fp8_e4_t = tsn::detail::Fp8Vector<uint8_t>;
using fp8_e4_2_t = tsn::detail::Fp8Vector<uint16_t>;
using fp8_e4_4_t = tsn::detail::Fp8Vector<uint32_t>;
using fp8_e4_8_t = tsn::detail::Fp8Vector<uint2>;
using fp8_e4_16_t = tsn::detail::Fp8Vector<uint4>;

__device__ __forceinline__ float2 __tl_cvt_fp8x2_to_float2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(x, kind);
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}
#endif

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;

// Relaxed; calls with an order have a third argument, and need tilelang's own.
template <typename T, typename Value>
__device__ __forceinline__ void AtomicAdd(T* address, Value value) {
  atomicAdd(address, static_cast<T>(value));
}

template <typename T, typename Value>
__device__ __forceinline__ T AtomicAddRet(T* address, Value value) {
  return atomicAdd(address, static_cast<T>(value));
}
