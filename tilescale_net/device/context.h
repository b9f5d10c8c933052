// The context: everything a kernel must know about the job, in one plain struct.
//
// One definition serves the device code, the native host code and (through layout checks) Python.
// A kernel receives a pointer to it; the pointer is the only thing that a kernel must take.
// Addresses are 64-bit integers so that the layout is the same everywhere.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tsn {

constexpr uint32_t kContextVersion = 1;

// Bytes at the start of every heap that belong to the package: barrier flags and queue heads.
constexpr uint64_t kSystemBytes = 64 * 1024;
// Word offsets (8-byte words) inside that area.
constexpr int kBarrierRounds = 32;
constexpr int kWorldBarrierFlags = 0;                                  // [kBarrierRounds] set by peers
constexpr int kNodeBarrierFlags = kWorldBarrierFlags + kBarrierRounds; // [kBarrierRounds] set by peers
constexpr int kWorldBarrierCount = kNodeBarrierFlags + kBarrierRounds; // local count of barriers so far
constexpr int kNodeBarrierCount = kWorldBarrierCount + 1;
constexpr int kBarrierEntered = kNodeBarrierCount + 1; // simulator: whether a block of this PE is inside a barrier
constexpr int kQueueWords = 128;                       // first word of the queues' device-side state
constexpr int kQueueWordsStride = 32; // words per queue: head and cached tail in cache lines of their own
constexpr int kMaxQueues = 64;
constexpr int kGridBarrierWords = 7 * 1024; // first word of the barriers among the blocks of a launch
constexpr int kGridBarriers = 16;
constexpr int kGridBarrierStride = 16; // words, a cache line each
// As many as the PE field of a descriptor can tell apart, and one value more for "all of them".
constexpr uint32_t kMaxPes = (1u << 14) - 1;
// Entries of peer_base that always exist, so that kernels can load one before they know the PE; 0 from n_pes on.
constexpr uint32_t kInlineBases = 128;
static_assert((kQueueWords + kMaxQueues * kQueueWordsStride) * 8 <= (int)kSystemBytes,
              "the system area holds all queues");
static_assert((kGridBarrierWords + kGridBarriers * kGridBarrierStride) * 8 <= (int)kSystemBytes,
              "the system area holds all grid barriers");

// One device queue as a kernel sees it.
struct QueueView {
  uint64_t slots;      // Descriptor[capacity], pinned host memory
  uint64_t tail;       // const uint64_t*: descriptors consumed so far, pinned host memory, written by the proxy
  uint64_t head;       // uint64_t*: next position to claim, device memory
  uint64_t tail_cache; // uint64_t*: the device's latest copy of *tail, device memory
  uint64_t done;       // const uint64_t[capacity]: done[p & mask] >= p + 1 once the flush or get at p finished
  uint64_t mask;       // capacity - 1; capacity is a power of two
  uint64_t reserved[2];
};
static_assert(sizeof(QueueView) == 64, "QueueView is 64 bytes");

// The record of a device that gives up; the host turns it into an exception.
enum ErrorKind : uint32_t {
  kNoError = 0,
  kWaitTimeout = 1,     // a wait on a signal passed its deadline
  kQueueTimeout = 2,    // the queue stayed full past the deadline
  kFlushTimeout = 3,    // a flush or a get did not finish within the deadline
  kPeOutOfRange = 4,    // pe < 0 or pe >= n_pes
  kNotSymmetric = 5,    // an address outside the symmetric heap
  kNotDirect = 6,       // a direct-path operation on a PE that is not mapped
  kUnsupported = 7,     // an operation that this path does not support
  kBarriersOverlap = 8, // two blocks, or two launches, of a PE in one barrier at the same time
};

struct ErrorRecord {
  uint32_t kind;       // ErrorKind; written last
  int32_t pe;          // the PE concerned, or -1
  uint32_t operation;  // Operation, see below
  uint32_t block;      // linear block index
  uint64_t address;    // local heap address concerned, or 0
  uint64_t expected;   // the value waited for, or 0
  uint64_t observed;   // the value seen last, or 0
  uint64_t bytes;      // the size of the access, or 0
  uint64_t claimed;    // 1 once a thread has begun to fill the record
  uint32_t comparison; // 1 + Compare of the wait that timed out, or 0
  uint32_t line;       // in the simulator 1 + number of the author's line in the kernel's table; else 0
};
static_assert(sizeof(ErrorRecord) == 64, "ErrorRecord is 64 bytes");

enum Operation : uint32_t {
  kOpNone = 0,
  kOpPut = 1,
  kOpGet = 2,
  kOpPutSignal = 3,
  kOpPutValue = 4,
  kOpSignal = 5,
  kOpWait = 6,
  kOpTest = 7,
  kOpAtomic = 8,
  kOpFence = 9,
  kOpQuiet = 10,
  kOpFlush = 11,
  kOpBarrier = 12,
  kOpRemote = 13,
  kOpBarrierGrid = 14,
};

struct Context {
  uint32_t version;     // kContextVersion
  uint32_t bytes;       // size of the whole context including peer_base
  int32_t my_pe;        // index of this PE in team "world"
  int32_t n_pes;        // size of team "world"
  int32_t node_pe;      // index of this PE in team "node"
  int32_t n_node_pes;   // size of team "node"; its PEs are consecutive: my_pe - node_pe + i
  uint32_t n_queues;    // queues to the proxy; 0 when every PE is direct
  uint32_t flags;       // ContextFlags
  uint64_t heap_base;   // local address of the symmetric heap
  uint64_t heap_bytes;  // its size; equal on all PEs
  uint64_t abort_word;  // uint32_t* in pinned host memory: non-zero ends every device-side wait
  uint64_t error;       // ErrorRecord* in pinned host memory
  uint64_t timeout_ns;  // deadline of one device-side wait
  uint64_t queues;      // const QueueView[n_queues], readable by the device
  uint64_t queue_share; // queue_share_of(n_queues)
  uint64_t trace;       // TraceBuffer of traced_calls.h in device memory, or 0; kernels compiled for a trace read it
  uint64_t reserved[4];
  // Written by the device: non-zero once this PE has seen the abort; kept where reading is cheap. It has its own
  // cache line, because the others are read through the read-only cache, whose lines may be stale.
  uint64_t aborted;
  uint64_t reserved_line[15];
  uint64_t peer_base[1]; // [max(n_pes, kInlineBases)]: local address of each PE's heap, 0 if the PE is not mapped
};
// Reciprocal of the number of queues: pe / n_queues = pe * share >> 32, exactly, because pe * n_queues < 2^32. A push
// needs its queue first, and a division takes longer than all its other work until then.
constexpr uint64_t queue_share_of(uint32_t n_queues) {
  return n_queues == 0 ? 0 : ((uint64_t(1) << 32) + n_queues - 1) / n_queues;
}
static_assert(uint64_t(kMaxPes) * kMaxQueues < (uint64_t(1) << 32), "PEs are divided exactly");
static_assert(offsetof(Context, heap_base) == 32, "Context layout");
static_assert(offsetof(Context, abort_word) == 48, "Context layout");
static_assert(offsetof(Context, queues) == 72, "Context layout");
static_assert(offsetof(Context, aborted) == 128, "Context layout");
static_assert(offsetof(Context, peer_base) == 256, "Context layout");

// Names of the operations in messages. For host code only.
constexpr const char* kOperationNames[] = {"none",   "put",   "get",     "put_signal", "put_value",
                                           "signal", "wait",  "test",    "atomic",     "fence",
                                           "quiet",  "flush", "barrier", "remote",     "barrier_grid"};
static_assert(sizeof(kOperationNames) / sizeof(kOperationNames[0]) == kOpBarrierGrid + 1, "each operation has a name");

} // namespace tsn
