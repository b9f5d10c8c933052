// The platform of platform.h on an NVIDIA GPU; the only device header with PTX. sm_70 and later, bulk copies from
// sm_90.
#pragma once

#include "context.h"
#include "types.h"
#include <string.h>

#define TSN_DEVICE __device__ __forceinline__
// For code that runs once in a kernel's life, if at all: kept out of line to leave the callers short.
#define TSN_COLD inline __device__ __noinline__
#define TSN_UNROLL _Pragma("unroll")
#define TSN_ROLLED _Pragma("unroll 1")

namespace tsn {
namespace platform {

constexpr bool kDefersRemoteWrites = false;
constexpr uint32_t kPollsPerCheck = 1024;
constexpr uint32_t kWarpThreads = 32;
constexpr bool kHasAtomic16b = true;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasBulk = true;
#else
constexpr bool kHasBulk = false;
#endif

// ---------------------------------------------------------------------------------------------------------- indices

#ifdef TSN_BLOCK_THREADS // the compiler knows the size of all blocks, and that they have one dimension
TSN_DEVICE uint32_t thread_index() { return threadIdx.x; }
TSN_DEVICE uint32_t block_threads() { return TSN_BLOCK_THREADS; }
#else
TSN_DEVICE uint32_t thread_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
TSN_DEVICE uint32_t block_threads() { return blockDim.x * blockDim.y * blockDim.z; }
#endif
TSN_DEVICE uint32_t block_index() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
TSN_DEVICE uint32_t grid_blocks() { return gridDim.x * gridDim.y * gridDim.z; }
TSN_DEVICE uint32_t grid_id() {
  uint64_t id;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(id));
  return uint32_t(id);
}
TSN_DEVICE uint32_t lane() { return thread_index() % kWarpThreads; }
TSN_DEVICE uint32_t kept_in_register(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// -------------------------------------------------------------------------------------------------- synchronisation

TSN_DEVICE void block_sync() { __syncthreads(); }
TSN_DEVICE void warp_sync() { __syncwarp(); }
TSN_DEVICE void lanes_sync(uint32_t lanes) { __syncwarp(lanes); }
TSN_DEVICE uint32_t popcount(uint32_t v) { return uint32_t(__popc(v)); }
TSN_DEVICE uint32_t active_lanes() { return __activemask(); }
TSN_DEVICE uint32_t match_lanes(uint32_t lanes, uint64_t v) { return __match_any_sync(lanes, (unsigned long long)v); }
TSN_DEVICE uint64_t shuffle(uint32_t lanes, uint64_t v, int from) {
  return __shfl_sync(lanes, (unsigned long long)v, from);
}

TSN_DEVICE uint64_t warp_broadcast(uint64_t v) {
  __syncwarp();
  return __shfl_sync(0xffffffffu, (unsigned long long)v, 0);
}

// Two slots in turn save a second barrier: thread 0 writes a slot again only after a later call's barrier, before
// which every thread has read the slot. The barrier's parity gives the turn, whose first value does not matter;
// thread 0 reads it before it computes, so that nothing comes between the result and the barrier.
template <class F>
TSN_DEVICE uint64_t block_broadcast(F f) {
  __shared__ uint64_t slot[2];
  __shared__ uint32_t turn;
  uint32_t mine = 0;
  if (thread_index() == 0) {
    mine = turn & 1;
    turn = mine ^ 1;
    slot[mine] = f();
  }
  return slot[__syncthreads_or((int)mine) ? 1 : 0];
}

// ----------------------------------------------------------------------------------------------------------- memory

namespace detail {

// The register of a value; PTX has none of 8 bits.
template <class T>
using Register = typename Word<(sizeof(T) < 2 ? 2 : sizeof(T))>::type;

template <class T>
TSN_DEVICE auto to_word(T v) {
  Register<T> w = 0;
  memcpy(&w, &v, sizeof(T));
  return w;
}
template <class T, class W>
TSN_DEVICE T from_word(W w) {
  T v;
  memcpy(&v, &w, sizeof(T));
  return v;
}

} // namespace detail

#define TSN_LOAD(op, clobber)                                                                                          \
  {                                                                                                                    \
    detail::Register<T> w;                                                                                             \
    if constexpr (sizeof(T) == 1) asm volatile(op ".b8 %0, [%1];" : "=h"(w) : "l"(p)clobber);                          \
    if constexpr (sizeof(T) == 2) asm volatile(op ".b16 %0, [%1];" : "=h"(w) : "l"(p)clobber);                         \
    if constexpr (sizeof(T) == 4) asm volatile(op ".b32 %0, [%1];" : "=r"(w) : "l"(p)clobber);                         \
    if constexpr (sizeof(T) == 8) asm volatile(op ".b64 %0, [%1];" : "=l"(w) : "l"(p)clobber);                         \
    return detail::from_word<T>(w);                                                                                    \
  }
#define TSN_STORE(op)                                                                                                  \
  {                                                                                                                    \
    const auto w = detail::to_word(v);                                                                                 \
    if constexpr (sizeof(T) == 1) asm volatile(op ".b8 [%0], %1;" ::"l"(p), "h"(w) : "memory");                        \
    if constexpr (sizeof(T) == 2) asm volatile(op ".b16 [%0], %1;" ::"l"(p), "h"(w) : "memory");                       \
    if constexpr (sizeof(T) == 4) asm volatile(op ".b32 [%0], %1;" ::"l"(p), "r"(w) : "memory");                       \
    if constexpr (sizeof(T) == 8) asm volatile(op ".b64 [%0], %1;" ::"l"(p), "l"(w) : "memory");                       \
  }
#define TSN_MEMORY : "memory"
#define TSN_SPACE "" // loads and stores may be of shared memory
#define TSN_SCOPES(macro, order)                                                                                       \
  if constexpr (O == Order::order && S == MemScope::cta) macro(#order ".cta" TSN_SPACE);                               \
  if constexpr (O == Order::order && S == MemScope::gpu) macro(#order ".gpu" TSN_SPACE);                               \
  if constexpr (O == Order::order && S == MemScope::sys) macro(#order ".sys.global");

// At system scope addresses are global, which saves the hardware the check.
template <Order O, MemScope S, class T>
TSN_DEVICE T load(const T* p) {
  static_assert(O != Order::release && O != Order::acq_rel, "a load cannot release");
#define TSN_ONE(name) TSN_LOAD("ld." name, TSN_MEMORY)
  if constexpr (O == Order::weak) TSN_ONE("weak");
  if constexpr (O == Order::volatile_) TSN_ONE("volatile");
  TSN_SCOPES(TSN_ONE, relaxed)
  TSN_SCOPES(TSN_ONE, acquire)
#undef TSN_ONE
}

template <Order O, MemScope S, class T>
TSN_DEVICE void store(T* p, T v) {
  static_assert(O != Order::acquire && O != Order::acq_rel, "a store cannot acquire");
#define TSN_ONE(name) TSN_STORE("st." name)
  if constexpr (O == Order::weak) TSN_ONE("weak");
  if constexpr (O == Order::volatile_) TSN_ONE("volatile");
  TSN_SCOPES(TSN_ONE, relaxed)
  TSN_SCOPES(TSN_ONE, release)
#undef TSN_ONE
}

template <class T>
TSN_DEVICE T load_constant(const T* p) {
  TSN_LOAD("ld.relaxed.cta.global", )
}

// Through the read-only cache, whose lines outlive the acquires that empty the rest of L1: after a wait this costs a
// third of a load from L2. The assembler may move such loads and their uses ahead of others; use load_constant if the
// order matters. Only a volatile one stays behind the conditions that guard it.
template <class T>
TSN_DEVICE T load_invariant(const T* p) {
  detail::Register<T> w;
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "invariants have 4 or 8 bytes");
  if constexpr (sizeof(T) == 4) asm("ld.global.nc.b32 %0, [%1];" : "=r"(w) : "l"(p));
  else asm("ld.global.nc.b64 %0, [%1];" : "=l"(w) : "l"(p));
  return detail::from_word<T>(w);
}
TSN_DEVICE uint64_t load_invariant_here(const uint64_t* p) {
  uint64_t w;
  asm volatile("ld.global.nc.b64 %0, [%1];" : "=l"(w) : "l"(p));
  return w;
}

TSN_DEVICE uint64_t load_recent(const uint64_t* p) {
  uint64_t w;
  asm volatile("ld.relaxed.cta.global.b64 %0, [%1];" : "=l"(w) : "l"(p));
  return w;
}

// ---------------------------------------------------------------------------------------------------------- atomics

#undef TSN_SPACE
#define TSN_SPACE ".global"
#define TSN_ATOM(name, type, constraint)                                                                               \
  {                                                                                                                    \
    asm volatile("atom." name "." type " %0, [%1], %2;" : "=" constraint(old) : "l"(p), constraint(value) : "memory"); \
    return old;                                                                                                        \
  }
#define TSN_ATOM_BITS(name)                                                                                            \
  if constexpr (sizeof(T) == 4) TSN_ATOM(name, "b32", "r") else TSN_ATOM(name, "b64", "l")
#define TSN_ATOM_ADD(name)                                                                                             \
  if constexpr (kFloat && sizeof(T) == 4) TSN_ATOM(name, "f32", "f")                                                   \
  else if constexpr (kFloat) TSN_ATOM(name, "f64", "d")                                                                \
  else if constexpr (sizeof(T) == 4) TSN_ATOM(name, "u32", "r")                                                        \
  else TSN_ATOM(name, "u64", "l")
#define TSN_ATOM_ORDERED(name)                                                                                         \
  if constexpr (kSigned && sizeof(T) == 4) TSN_ATOM(name, "s32", "r")                                                  \
  else if constexpr (kSigned) TSN_ATOM(name, "s64", "l")                                                               \
  else if constexpr (sizeof(T) == 4) TSN_ATOM(name, "u32", "r")                                                        \
  else TSN_ATOM(name, "u64", "l")
#define TSN_OP(op, atom)                                                                                               \
  if constexpr (Op == AtomicOp::op) {                                                                                  \
    atom                                                                                                               \
  }
#define TSN_ONE(order)                                                                                                 \
  {                                                                                                                    \
    TSN_OP(add, TSN_ATOM_ADD(order ".add"));                                                                           \
    TSN_OP(and_, TSN_ATOM_BITS(order ".and"));                                                                         \
    TSN_OP(or_, TSN_ATOM_BITS(order ".or"));                                                                           \
    TSN_OP(xor_, TSN_ATOM_BITS(order ".xor"));                                                                         \
    TSN_OP(min, TSN_ATOM_ORDERED(order ".min"));                                                                       \
    TSN_OP(max, TSN_ATOM_ORDERED(order ".max"));                                                                       \
    TSN_OP(exch, TSN_ATOM_BITS(order ".exch"));                                                                        \
  }

template <AtomicOp Op, Order O, MemScope S, class T>
TSN_DEVICE T atomic(T* p, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics work on 4 and 8 bytes");
  constexpr bool kFloat = T(0.5) != T(0), kSigned = T(-1) < T(0);
  static_assert(!kFloat || Op == AtomicOp::add || Op == AtomicOp::exch, "only add and exch on floating-point numbers");
  if constexpr (kFloat && Op == AtomicOp::exch) {
    const auto w = detail::to_word(value);
    return detail::from_word<T>(atomic<Op, O, S>((decltype(detail::to_word(value))*)p, w));
  } else {
    T old;
    TSN_SCOPES(TSN_ONE, relaxed)
    TSN_SCOPES(TSN_ONE, acquire)
    TSN_SCOPES(TSN_ONE, release)
    TSN_SCOPES(TSN_ONE, acq_rel)
    return old;
  }
}
#undef TSN_ONE
#undef TSN_OP

TSN_DEVICE void store_pair(void* p, uint64_t first, uint64_t second) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}

// With a constant addend, equal in all lanes, the assembler would aggregate over the lanes and distribute the result
// at once, which waits for it. It does not know that a lane's number is below 32.
TSN_DEVICE uint64_t add_one_ahead(uint64_t* p) {
  uint32_t lane;
  uint64_t old;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint64_t one = 1 + (lane >> 5);
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(one) : "memory");
  return old;
}

template <Order O, MemScope S, class T>
TSN_DEVICE T atomic_cas(T* p, T compare, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics work on 4 and 8 bytes");
  auto c = detail::to_word(compare), w = detail::to_word(value), old = w;
#define TSN_ONE(order)                                                                                                 \
  {                                                                                                                    \
    if constexpr (sizeof(T) == 4)                                                                                      \
      asm volatile("atom." order ".cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(c), "r"(w) : "memory");        \
    else asm volatile("atom." order ".cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(c), "l"(w) : "memory");     \
  }
  TSN_SCOPES(TSN_ONE, relaxed)
  TSN_SCOPES(TSN_ONE, acquire)
  TSN_SCOPES(TSN_ONE, release)
  TSN_SCOPES(TSN_ONE, acq_rel)
#undef TSN_ONE
  return detail::from_word<T>(old);
}

template <class T>
TSN_DEVICE T opaque(T v) {
  auto w = detail::to_word(v);
  if constexpr (sizeof(T) == 4) asm volatile("" : "+r"(w));
  else asm volatile("" : "+l"(w));
  return detail::from_word<T>(w);
}

// Without the old value the memory system need not answer.
TSN_DEVICE void add_relaxed(uint64_t* p, uint64_t value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
TSN_DEVICE void add_release(uint64_t* p, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

template <MemScope S>
TSN_DEVICE void fence() {
  if constexpr (S == MemScope::cta) asm volatile("fence.acq_rel.cta;" ::: "memory");
  if constexpr (S == MemScope::gpu) asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if constexpr (S == MemScope::sys) asm volatile("fence.acq_rel.sys;" ::: "memory");
}

#undef TSN_LOAD
#undef TSN_STORE
#undef TSN_MEMORY
#undef TSN_SCOPES
#undef TSN_SPACE
#undef TSN_ATOM
#undef TSN_ATOM_BITS
#undef TSN_ATOM_ADD
#undef TSN_ATOM_ORDERED

// ------------------------------------------------------------------------------------------------------------- time

TSN_DEVICE uint64_t timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
TSN_DEVICE uint32_t ticks() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
  return t;
}
TSN_DEVICE void relax() {}

} // namespace platform
} // namespace tsn

#include "platform_cuda_copy.h"
