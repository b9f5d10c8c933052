// The machine's interface. platform_cuda.h holds all PTX, platform_host.h (the simulator) all host atomics and
// fibers; every other device header is plain C++ on top of the functions listed here, and includes this file only.
//
// Both files define TSN_DEVICE (the qualifiers of every device function), TSN_COLD (of one that is kept out of
// line) and, in namespace tsn::platform:
//
//   constexpr bool kDefersRemoteWrites      true: the platform takes whole operations away from the engines, see below
//   constexpr uint32_t kPollsPerCheck       polls of a spin between two looks at the abort word and the clock
//   constexpr uint32_t kWarpThreads = 32
//   constexpr bool kHasBulk                 whether bulk copies exist; otherwise the ldst engine copies
//   constexpr bool kHasAtomic16b            whether 16 bytes can be stored as one
//
// Indices
//   uint32_t thread_index()                 linear index of the thread in its block
//   uint32_t block_threads()                threads in the block
//   uint32_t block_index()                  linear index of the block in the grid
//   uint32_t grid_blocks()                  blocks in the grid
//   uint32_t grid_id()                      distinguishes launches that run at the same time
//   uint32_t lane()                         thread_index() % 32
//   uint32_t kept_in_register(uint32_t v)   v, not recomputed at its uses
//
// Synchronisation. "Orders memory": everything before the call in any participant happened before
// everything after the call in any other.
//   void block_sync()                       all threads of the block; orders memory
//   void warp_sync()                        all lanes of the warp; orders memory
//   uint64_t block_broadcast(f)             f() of thread 0, to all threads of the block; contains one block_sync
//   uint64_t warp_broadcast(uint64_t v)     v of lane 0, to all lanes of the warp; contains a warp_sync
//   uint32_t popcount(uint32_t lanes)       number of set bits
//   uint32_t active_lanes()                 lanes that run this call together; at least the caller's own bit
//   uint32_t match_lanes(uint32_t lanes, uint64_t v)       those of `lanes` (all call) whose v equals the caller's
//   uint64_t shuffle(uint32_t lanes, uint64_t v, int from) v of lane `from`, one of `lanes` (all call)
//   void lanes_sync(uint32_t lanes)         warp_sync among `lanes`
//
// Memory. T has 1, 2, 4 or 8 bytes and is naturally aligned. Addresses are of global memory; load and store below
// system scope take any.
//   T load<Order, MemScope>(const T*)       Order: weak, relaxed, acquire, volatile_
//   void store<Order, MemScope>(T*, T)      Order: weak, relaxed, release, volatile_
//   T atomic<AtomicOp, Order, MemScope>(T*, T)             old value; 4 or 8 bytes; Order: relaxed, acquire, release,
//                                           acq_rel; and_, or_, xor_ on integers, add also on float and double
//   T atomic_cas<Order, MemScope>(T*, T compare, T value)  old value; 4 or 8 bytes
//   void store_pair(void*, uint64_t, uint64_t)             two words, to 16-byte aligned memory
//   uint64_t add_one_ahead(uint64_t*)       old value, relaxed at gpu scope; a thread that does not use it yet
//   continues
//                                           meanwhile, which it does not after `atomic`
//   void add_relaxed(uint64_t*, uint64_t)   adds without an answer, relaxed at system scope
//   void add_release(uint64_t*, uint64_t)   the same with release order
//   void fence<MemScope>()                  acquire and release fence of that scope
//   T load_constant(const T*)               a value that never changes while the kernel runs (context fields); issued
//                                           where it is written, so that loads in a row overlap
//   T load_invariant(const T*)              the same, 4 or 8 bytes, but loaded where the compiler chooses, and only
//                                           once: also ahead of the conditions that guard it, so p must be readable
//                                           anyway
//   uint64_t load_invariant_here(const uint64_t*)          the same, but not before the conditions that guard it
//   uint64_t load_recent(const uint64_t*)   global memory, as it was at the block's latest acquire or later; from L1
//                                           where that is recent enough
//   T load_data(const T*)                   global memory that others write: T of 1, 2, 4, 8 bytes or Vec16; relaxed at
//                                           system scope, not through the read-only cache, not kept in L1
//   void store_data(T*, T)                  the store to match
//   void load_data_below(T* v, const T*, int at, int limit)   load_data into *v if at < limit, else *v = 0 or undefined
//   void store_data_below(T*, T, int at, int limit)           store_data if at < limit
//   void store_16b(Vec16*, Vec16)           one 16-byte store seen as a whole at system scope (queue descriptors);
//                                           without order: fence before it to publish
//   void store_16b_below(Vec16*, Vec16, int at, int limit)   store_16b if at < limit, without a branch
//
// Registers
//   T opaque(T)                             the value, of 4 or 8 bytes, opaque to the compiler: computations from it
//                                           stay where it is used
//
// Time
//   uint64_t timer_ns()                     a clock in nanoseconds, the same for all threads of the GPU
//   uint32_t ticks()                        a cheap counter, for sampling
//   void relax()                            called once per failed poll of every spin
//
// Bulk copies: one thread moves blocks of a multiple of 16 bytes between 16-byte aligned global memory and shared
// memory. Each stage of a ring has an mbarrier; a load completes it by its bytes.
//   uint64_t* stage_barriers<Stages>()      shared memory for the mbarriers of the block's ring
//   void barrier_init(uint64_t*) / barrier_retire(uint64_t*)
//   void barrier_expect(uint64_t*, uint32_t bytes)
//   void barrier_wait(uint64_t*, uint32_t parity)
//   void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier)
//   void bulk_store(void* global, const void* shared, uint32_t bytes)
//   void bulk_commit()                      closes a group of stores of the calling thread
//   void bulk_wait_read<N>()                until all but the last N groups have read their shared memory
//   void bulk_wait<N>()                     until all but the last N groups are complete, their writes performed
//   void bulk_publish()                     makes this thread's stores to global memory visible to its own bulk
//                                           copies, and to others' after a barrier
//   void bulk_fence()                       the same for shared memory, mbarriers included, and its own bulk copies
//
// Deferral, used by the simulator to make remote writes visible as late as the memory model allows. It exists where
// kDefersRemoteWrites is true; elsewhere it is declared and never defined. put, put_signal, put_value, signal, atomics,
// fence and quiet offer the whole operation first; `true` means taken: the engine then does nothing more. The caller is
// the leader of the scope; the scope has been synchronised before. Addresses and PE are checked: `dst` is the local
// symmetric address, `peer` the same offset in the target's heap as mapped here. Only direct PEs get here,
// except for defer_fence and defer_quiet (pe = -1: all PEs), which run before the proxy's own fence or flush; with true
// they mean that the direct path is done.
//   bool defer_put(const Context*, void* dst, void* peer, const void* src, int64_t bytes, int pe)
//   bool defer_put_signal(const Context*, void* dst, void* peer, const void* src, int64_t bytes, int pe,
//                         uint64_t* signal, uint64_t* peer_signal, uint64_t value, SignalOp)
//   bool defer_put_rows(const Context*, void* dst, void* peer, const void* src, int64_t rows, int64_t bytes,
//                       int64_t dst_pitch, int64_t src_pitch, int pe, uint64_t* signal, uint64_t* peer_signal,
//                       uint64_t value, SignalOp)               with and without a signal
//   bool defer_put_value(const Context*, void* dst, void* peer, uint64_t value, int bytes, int pe)
//   bool defer_signal(const Context*, uint64_t* signal, uint64_t* peer_signal, uint64_t value, SignalOp, int pe)
//   bool defer_atomic<T>(const Context*, AtomicOp, T* dst, T* peer, T value, int pe, T* old)
//   bool defer_atomic_cas<T>(const Context*, T* dst, T* peer, T compare, T value, int pe, T* old)
//   void reach(const void* word, bool changes)   before a kernel's own load or store of this word
//   bool defer_fence(const Context*, int pe)
//   bool defer_quiet(const Context*, int pe)
//   void announce(Operation, Scope, dst, src, bytes, pe, sig, value, SignalOp, rows,
//                 dst_pitch, src_pitch)     every thread of the scope, before it meets for a call; `bytes` of each row
//   void begin(the same)                    the leader, after the scope has met
//   void signalling(const uint64_t* sig, int pe, uint64_t value, SignalOp)
//                                           before a signal to a mapped PE that was not offered
//   void flushed(uint64_t ticket, bool ended)   a flush has begun, or ended
//   void waited(const uint64_t* sig)        a wait or test has seen its signal
//   void expect_empty(const Vec16*)         a vector that carries its own arrival is about to be written there
//   void benign_race(const void*, int64_t bytes)   accesses there race on purpose
//   void wait_begins(Operation, int pe, const uint64_t* word, uint64_t wanted, uint32_t comparison)
//                                           a thread has polled once and must wait; pe = -1: for an unknown PE,
//                                           word = nullptr: not for a word of the heap
//   bool waits_without_a_look()             wait_begins comes before the first look
//   void wait_ends(), void gives_up()       the same thread continues, or is about to record a failure
//   uint32_t line()                         1 + number of the author's line where the thread is, or 0
//   void range_begins(), void range_ends()  the running thread's ranges for the timeline
//   void before_ld<Order>()                 before a kernel's own load with this order, perhaps in a loop
//   void after_ld<O, S>(const void*), before_st<O, S>(const void*)   after the load, and before a store
//   void inspect(Operation, const void* local, int64_t bytes)  the leader is about to use these local (symmetric)
//                                           addresses; the simulator checks that they lie in one live allocation
#pragma once

#include "context.h"
#include "types.h"
#include <string.h>

#if defined(__CUDACC__)
#include "platform_cuda.h"
#else
#include "platform_host.h"
#endif

#ifndef TSN_UNROLL // before a loop with a constant number of rounds
#define TSN_UNROLL
#endif
// Branch hints: unlikely code stands apart from the path of a small message.
#define TSN_LIKELY(x) __builtin_expect(!!(x), 1)
#define TSN_UNLIKELY(x) __builtin_expect(!!(x), 0)

#ifndef TSN_ROLLED // before a loop that must not be unrolled
#define TSN_ROLLED
#endif
