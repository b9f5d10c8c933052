// Interface between a simulated kernel and the simulator: the running thread, and a table of functions.
//
// A kernel is compiled into its own shared library, which cannot link against the extension; it gets this table when
// it is loaded. Only plain types cross the border.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tsn {
namespace sim {

constexpr uint32_t kApiVersion = 14;

struct Index3 {
  unsigned x, y, z;
};

// The last accesses to 4 bytes of this rank's memory, in one launch: stamps of the last store and of the last loads
// of two warps, and their accesses: the variable's name (48 bits) and the site, plus 1, of the thread's latest
// primitive. A stamp: epoch of the warp (32 bits), warp (16), lane (5), which of the bytes (4), atomic (1). 0: none.
struct LocalCell {
  uint64_t store, load[2];
  uint64_t store_info, load_info[2];
};
constexpr uint64_t kLocalPage = 4096, kLocalLines = 256, kLocalKnown = 64;
constexpr uint64_t kLocalMask = 0xfull << 7, kLocalAtomic = 1ull << 6, kLocalThread = 0x1full << 11 | 0xffffull << 16;

// Index of a thread's knowledge of the thread of a stamp.
inline uint64_t local_slot(uint64_t stamp) { return (stamp >> 11 ^ stamp >> 13) % kLocalKnown; }

// Cells of pages of kLocalPage bytes, by number; the simulator has the pages that are not here.
struct LocalPages {
  struct Line {
    uint64_t number;
    LocalCell* cells;
  } lines[kLocalLines];
};

enum class LocalAccess : uint32_t { load, store, atomic, atomic_load };

// Which of the 4 bytes at `at` lie in [begin, begin + bytes).
inline uint64_t local_mask(uint64_t at, uint64_t begin, uint64_t bytes) {
  if (begin <= at && begin + bytes >= at + 4) return kLocalMask;
  uint64_t mask = 0;
  for (uint64_t i = 0; i < 4; ++i)
    if (at + i >= begin && at + i < begin + bytes) mask |= 1ull << 7 << i;
  return mask;
}

// Instead of a stamp of a load: a put that may still read the bytes, by its number; of no warp that there is.
constexpr uint64_t kLocalPut = 0xffffull << 16 | 1ull << 63;
inline bool is_local_put(uint64_t stamp) { return (stamp & kLocalPut) == kLocalPut; }

// Leaves an access in its cell, merged with the thread's other accesses of the same epoch.
inline void local_loaded(LocalCell& c, uint64_t own, uint64_t info) {
  const uint64_t same = ~(kLocalMask | kLocalAtomic), warp = 0xffffull << 16;
  if ((c.load[0] & same) == (own & same)) {
    const uint64_t both_atomic = c.load[0] & own & kLocalAtomic;
    c.load[0] = ((c.load[0] | own) & ~kLocalAtomic) | both_atomic;
    return;
  }
  if ((c.load[0] ^ own) & warp && !is_local_put(c.load[1])) c.load[1] = c.load[0], c.load_info[1] = c.load_info[0];
  c.load[0] = own;
  c.load_info[0] = info;
}
inline void local_stored(LocalCell& c, uint64_t own, uint64_t info) {
  const uint64_t same = ~kLocalMask;
  c.store = (c.store & same) == (own & same) ? c.store | own : own;
  c.store_info = info;
  c.load[0] = c.load[1] = 0;
}

// The last accesses to a heap, a stamp of csrc/simulator/race_memory.h for each 4 bytes, or for each byte if those of
// the word are kByBytes; and the sites of plain ones.
struct HeapAccesses {
  uint64_t* words;
  uint16_t* word_sites;
  uint64_t* bytes;
  uint16_t* byte_sites;
};
constexpr uint64_t kByBytes = ~0ull, kParting = kByBytes - 256; // the latter: not yet

// The part of a simulated CUDA thread that compiled kernels read directly.
struct Thread {
  Index3 thread_idx, block_idx, block_dim, grid_dim;
  unsigned linear;       // thread index within the block
  unsigned lane;         // linear % 32
  unsigned linear_block; // block index within the grid
  int quantum;           // accesses left until the next forced yield
  void* dynamic_shared;
  uint64_t dynamic_shared_bytes;
  int site;            // of the primitive that it calls, or of its statement: an index into the kernel's lines, or -1
  bool uses_result;    // of the primitive
  bool loads_followed; // loads of the heap are
  bool followed;       // accesses to synchronisation words are reported
  bool scheduled;      // a scheduler decides at each such access which thread continues, and time stands still
  bool at_mbarrier;    // it waits for one
  bool polls;          // its next load of such a word orders nothing: `polled` does
  // The last stores to this rank's heap, and the last loads; null if they are not checked. The last byte of `stamp`,
  // the thread's own, is that of all plain accesses of this rank.
  HeapAccesses stores, loads;
  const uint16_t* heap_sites; // numbers of the kernel's lines, from -1 on
  uint64_t heap_base, heap_bytes;
  uint64_t peers_begin, peers_bytes; // heaps of other ranks lie in this range; 0: they are not followed
  uint64_t stamp;
  uint64_t ordered_store, ordered_load; // others' that come before the thread
  // The same for accesses of this rank alone. Null if they are not checked. `local_known`: threads (32 bits, as in a
  // stamp) and up to which epoch (32 bits) they come before this one; `local_begin`: the first epoch of the launch.
  LocalPages* local;
  uint64_t local_stamp, local_begin;
  uint64_t local_known[kLocalKnown];
};

// Operations in which the lanes of a mask meet; the result of lane i is computed when the last one arrives.
enum class WarpOp : uint32_t {
  sync,
  shuffle, // out = value of lane `argument`
  ballot,  // out = bit i set where lane i passed a non-zero value
  match_any,
  match_all, // out = mask when all values are equal, else 0
};

// Result of a block barrier: number of threads with a non-zero value, whether all or any had one, or thread 0's value.
enum class VoteOp : uint32_t { count, all, any, broadcast };

// Type of an atomic operation's number.
enum class Number : uint32_t { none, int32, uint32, int64, uint64, float32, float64 };
constexpr uint32_t bytes_of(Number n) {
  return n == Number::int64 || n == Number::uint64 || n == Number::float64 ? 8 : 4;
}

// One put, put_value, signal or atomic operation from platform_host.h; see device/platform.h.
struct RemoteOperation {
  const char* name;   // the primitive
  void* destination;  // local symmetric address; null for a bare signal
  void* peer;         // the same offset in the target's heap
  const void* source; // null: the data are the low bytes of `value`
  int64_t bytes;
  uint64_t value;   // of the signal, or of put_value
  uint64_t* signal; // local symmetric address; null for none
  uint64_t* peer_signal;
  bool add; // signal operation: add, else set
  int pe;
  // Rows of `bytes / rows` bytes, if the data are not contiguous; the distance between two of them.
  int64_t rows = 1, pitch = 0, source_pitch = 0;
  // An atomic operation on a number of this kind, instead of a signal: `value` holds the bits of its operand, and
  // `add` means that the order among such operations does not matter.
  Number number = Number::none;
  uint32_t atomic = 0; // AtomicOp of types.h
};

// One call of a primitive, as announced by the device functions. Members that a primitive lacks are zero, `pe` is -1
// for all PEs and -2 for none.
struct Call {
  uint32_t operation; // Operation of context.h
  uint32_t scope;     // Scope of types.h
  const void* destination;
  const void* source;
  int64_t bytes; // of a wait or test: its Compare of types.h
  int pe;
  const uint64_t* signal;
  uint64_t value;
  bool add; // signal operation: add, else set
  // Of a copy: rows of `bytes` each, and the distance between two of them at the destination and at the source.
  int64_t rows, pitch, source_pitch;

  // f(destination, source) of each row.
  template <typename F>
  void each_row(F f) const {
    for (int64_t i = 0; i < rows; ++i)
      f(static_cast<const char*>(destination) + i * pitch, static_cast<const char*>(source) + i * source_pitch);
  }
};

// Effect of an access on a synchronisation word.
enum class WordAccess : uint32_t { read, write, update };

// How such an access orders threads within its scope. A relaxed one has neither: a fence before a write, or after a
// read, of the same thread replaces it.
struct Ordering {
  bool acquires, releases;
  uint32_t scope;     // MemScope of types.h
  bool total = false; // sequentially consistent
};

// Its effect on the word, if known: the word becomes `value`, or grows by it. `before`: the word before a store.
struct Written {
  enum How : uint32_t { other, set, add } how = other;
  int64_t value = 0, before = 0;
};

struct RemoteApi {
  // Called by every thread of the scope, before the scope meets: its next barrier finds threads that call something
  // else.
  void (*announce)(const Call&);
  // Called by the leader, after the scope has met: checks and records the call's accesses.
  void (*begin)(const Call&);
  // A wait or test has seen its signal.
  void (*waited)(const uint64_t* signal);
  // A load, a store or an atomic operation by which threads may order each other. `bytes`: 0 if another call has
  // reported the access, and this one reports its order.
  void (*word)(const void* address, uint64_t bytes, WordAccess access, Ordering ordering, Written written);
  // The thread polls, and this value of its latest load of such a word has ended the loop; `ends`: whether one does.
  void (*polled)(int64_t value, bool (*ends)(const void* condition, int64_t value), const void* condition);
  // A fence, of a MemScope.
  void (*fenced)(uint32_t scope, bool total);
  // The thread is about to make such an access; returns when it may. Called if the thread is `scheduled`.
  void (*visit)(const void* address, uint64_t bytes, WordAccess access);
  // A plain access to this rank's heap that follows one of another thread.
  void (*accessed)(const void* address, uint64_t bytes, bool store, const char* name);
  // The same through a remote view, whose address may lie in a peer's heap.
  void (*viewed)(const void* address, uint64_t bytes, bool store, const char* name);
  // A plain access to memory of this rank, or an atomic one, that the thread cannot judge alone. `base`: the begin of
  // the variable of this name.
  void (*local_access)(const void* address, uint64_t bytes, LocalAccess access, const char* name, const void* base);
  // Accesses to these bytes race on purpose, in this launch.
  void (*benign_race)(const void* address, uint64_t bytes);
  // An untracked function gets a pointer.
  void (*hands_pointer)();
  // A signal that was not offered to `defer` is about to be sent.
  void (*signalling)(const uint64_t* signal, int pe, uint64_t value, bool add);
  // True: taken, for a later delivery. False: the caller executes it now.
  bool (*defer)(const RemoteOperation&);
  // A flush with this ticket has begun, by the call that was announced last, or ended.
  void (*flushed)(uint64_t ticket, bool ended);
  // The thread is about to load from or change a word of a heap itself, at once: delivers the operations that must
  // come before.
  void (*reach)(const void* word, bool changes);
  void (*fence)(int pe); // -1: all PEs
  void (*quiet)(int pe);
  // Raises OutOfBounds when the range is in the symmetric heap and not in one live allocation.
  void (*check)(const char* name, const void* address, uint64_t bytes);
};

// The subject of a thread's wait.
struct WaitSubject {
  uint32_t operation;   // Operation of context.h
  int pe;               // the awaited PE; -1: unknown
  const uint64_t* word; // a signal word of the heap, or null
  int64_t wanted;
  uint32_t comparison; // 1 + Compare, or 0
};

// Reports of kernels' waits and calls, for hang reports and traces.
struct TraceApi {
  // The running thread has polled once and must wait.
  void (*wait_begins)(const WaitSubject&);
  void (*wait_ends)();
  // The running thread gives up: from here on all waits of this PE end.
  void (*gives_up)();
  // Whether calls are traced now; `call_ends` is called only then: the running thread's call has ended.
  const bool* traces;
  void (*call_ends)();
  // A range of the running thread, named in the table of lines.
  void (*range_begins)();
  void (*range_ends)();
};

struct Api {
  uint32_t version;
  uint32_t bytes;

  // Scheduling. `polled`: the caller only read memory and found nothing to do.
  void (*yield)(bool polled);
  void (*block_barrier)(int id, int count, bool arrive_only); // count 0: all threads of the block
  uint64_t (*block_vote)(VoteOp op, uint64_t value);
  uint64_t (*warp)(WarpOp op, uint32_t mask, uint64_t value, uint32_t argument);
  uint32_t (*active_mask)(const void* site);
  void (*grid_barrier)();

  // Memory.
  void* (*static_shared)(int id, size_t bytes);
  void (*out_of_bounds)(const char* name, int64_t offset, uint64_t bytes, uint64_t extent); // does not return
  void (*index_outside)(const char* name, int axis, int64_t index, int64_t extent);         // does not return
  void (*trap)(const char* message);                                                        // does not return
  void (*print)(const char* text);

  // Random numbers of the schedule, for choices that platform_host.h makes.
  uint64_t (*random)();

  const RemoteApi* remote;
  const TraceApi* trace;
};

} // namespace sim
} // namespace tsn
