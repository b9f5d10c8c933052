// The choices that a kernel makes at compile time, which the compiler writes as template arguments; and values as
// machine words, for atomics and registers that know integers only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tsn {

// The threads that make a call together: one thread, all lanes of a warp, all threads of a block.
enum class Scope { thread, warp, block };

// How bytes move on the direct path: unrolled loads and stores, or bulk (TMA) copies through a shared memory ring.
enum class Engine { automatic, ldst, bulk };

enum class SignalOp { set, add };

enum class Compare { eq, ne, ge, gt, le, lt };

enum class AtomicOp { add, and_, or_, xor_, min, max, exch };

enum class Order { weak, relaxed, acquire, release, acq_rel, volatile_ };

enum class MemScope { cta, gpu, sys };

// The widest unit that one thread moves.
struct alignas(16) Vec16 {
  uint32_t x, y, z, w;
};

template <size_t bytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint64_t;
};
// The unsigned integer of T's size.
template <class T>
using WordOf = typename Word<sizeof(T)>::type;

} // namespace tsn
