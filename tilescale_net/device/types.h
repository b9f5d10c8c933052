// The choices that a kernel makes at compile time; the compiler writes them as template arguments.
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

} // namespace tsn
