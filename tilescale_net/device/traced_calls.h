// Calls of primitives on GPUs as events for TSN_TRACE. Kernels compiled for a trace include this file, and call
// primitives through TSN_TRACED; others contain none of it.
#pragma once

#include "error.h"
#include "scope.h"

namespace tsn {

constexpr uint64_t kNoTracedWord = ~uint64_t(0);

// One call of a primitive, by the thread that leads it. trace/traced_calls.py reads these 64 bytes.
struct alignas(16) TracedCall {
  uint64_t begin_ns,
      end_ns;     // the GPU's clock; an end of 0: it has not ended, or was cut short when the job was aborted
  uint64_t word;  // address of a signal word, or kNoTracedWord
  uint64_t value; // of a wait: the value to wait for, then the word that ended the wait
  uint64_t bytes;
  uint32_t site; // number of the kernel << 16 | of the call in it
  int32_t pe;    // or -1
  uint32_t block, thread;
  uint64_t number; // low 32 bits of the number of earlier entries
};
static_assert(sizeof(TracedCall) == 64, "trace/traced_calls.py reads 64 bytes a call");

// In device memory: a ring of ended calls, in which new ones overwrite the oldest. Behind it two tables for the
// report of a hang, with an entry per warp: its last wait, and the first one cut short by an abort. Contexts hold
// its address and, in the bits that its alignment leaves, the binary logarithm of the ring's capacity.
struct TraceBuffer {
  uint64_t claimed;  // ring entries claimed so far; some are never used
  uint64_t capacity; // of the ring, a power of two
  uint64_t reserved[14];
};
static_assert(sizeof(TraceBuffer) == 128, "trace/traced_calls.py expects the ring 128 bytes behind the start");
constexpr uint32_t kTracedBlocks = 1024; // blocks this far apart share table entries
constexpr uint32_t kTracedWarps = 32;
constexpr uint64_t kLongWaitNs = 1000000; // only waits at least this long count as cut short
#ifndef TSN_SHORT_WAIT_NS
#define TSN_SHORT_WAIT_NS 1000
#endif
constexpr uint64_t kShortWaitNs = TSN_SHORT_WAIT_NS; // warps and threads omit shorter waits

namespace detail {

// Argument number I of a call as an integer; -1 for none.
template <int I>
TSN_DEVICE int64_t argument() {
  return -1;
}
template <int I, class A, class... Others>
TSN_DEVICE int64_t argument(A first, Others... others) {
  if constexpr (I < 0) return -1;
  else if constexpr (I == 0) return (int64_t)first;
  else return argument<I - 1>(others...);
}

// In four stores of 16 bytes; an assignment would take more.
TSN_DEVICE void store(TracedCall* entry, const TracedCall& call) {
  char* at = reinterpret_cast<char*>(entry);
  platform::store_pair(at, call.begin_ns, call.end_ns);
  platform::store_pair(at + 16, call.word, call.value);
  platform::store_pair(at + 32, call.bytes, (uint64_t)(uint32_t)call.pe << 32 | call.site);
  platform::store_pair(at + 48, (uint64_t)call.thread << 32 | call.block, call.number);
}

template <class T>
struct IsVoid {
  static constexpr bool value = false;
};
template <>
struct IsVoid<void> {
  static constexpr bool value = true;
};

} // namespace detail

// A thread's data for writing to the ring; generated code has one, tsn_traced. Site identifies the kernel itself,
// whose begin and end the first thread of each block records; the value is the number of blocks.
//
// A call costs a few instructions of one thread, for which others wait. So nothing here waits for memory, except for
// a thread's first ring entry: later ones are claimed ahead of their call. A thread's indices are read once,
// because that takes the hardware tens of cycles.
template <uint32_t Site>
class TracedKernel {
public:
  // Takes the context as generated code has it.
  TSN_DEVICE explicit TracedKernel(const void* context)
      : ring_(platform::load_invariant(&static_cast<const Context*>(context)->trace)),
        block_(platform::kept_in_register(platform::block_index())),
        thread_(platform::kept_in_register(platform::thread_index())) {
    if (thread_ == 0) begin_ns_ = platform::timer_ns();
  }

  TSN_DEVICE ~TracedKernel() {
    if (ring_ == 0 || thread_ != 0) return;
    TracedCall call = {};
    call.begin_ns = begin_ns_;
    call.end_ns = platform::timer_ns();
    call.word = kNoTracedWord;
    call.value = platform::grid_blocks();
    call.site = Site;
    call.pe = -1;
    call.block = block_;
    prepare();
    write(call);
  }

  TSN_DEVICE bool is_on() const { return ring_ != 0; }

  // A thread without an entry claims one, which arrives while the call runs.
  TSN_DEVICE void prepare() {
    if (next_ == kNone) claim();
  }

  // Writes a call to its entry, after prepare.
  TSN_DEVICE void write(TracedCall call) {
    call.number = next_;
    detail::store(&ring()[next_ & (capacity() - 1)], call);
    next_ = kNone;
  }

  // For the thread's next call.
  TSN_DEVICE void claim() { next_ = (uint32_t)platform::add_one_ahead(&buffer()->claimed); }

  TSN_DEVICE uint32_t block() const { return block_; }
  TSN_DEVICE uint32_t thread() const { return thread_; }

  // This warp's entry in one of the tables.
  TSN_DEVICE TracedCall* wait_of_warp(uint32_t table) const {
    const uint32_t warp = thread_ / platform::kWarpThreads % kTracedWarps;
    return ring() + capacity() + (table * kTracedBlocks + block_ % kTracedBlocks) * kTracedWarps + warp;
  }

private:
  static constexpr uint32_t kNone = ~uint32_t(0);

  TSN_DEVICE TraceBuffer* buffer() const { return (TraceBuffer*)(ring_ & ~uint64_t(sizeof(TraceBuffer) - 1)); }
  TSN_DEVICE TracedCall* ring() const { return reinterpret_cast<TracedCall*>(buffer() + 1); }
  TSN_DEVICE uint32_t capacity() const { return 1u << (ring_ & (sizeof(TraceBuffer) - 1)); }

  const uint64_t ring_;
  const uint32_t block_, thread_;
  uint64_t begin_ns_ = 0;
  uint32_t next_ = kNone;
};

// A primitive that records its call. Pe, Word, Value, Bytes and Rows are the numbers of these arguments behind the
// context; -1: none. Waits: it may wait for other PEs, and is in the table meanwhile.
template <uint32_t Site, Scope S, bool Waits, int Pe, int Word, int Value, int Bytes, int Rows, class K, class F>
struct Traced {
  K& kernel;
  F primitive;

  template <class... A>
  TSN_DEVICE auto operator()(const Context* ctx, A... a) const {
    const bool is_noted = scope_leader<S>() && kernel.is_on();
    uint64_t begin = 0;
    if (is_noted) {
      kernel.prepare();
      begin = platform::timer_ns();
      if constexpr (Waits) detail::store(kernel.wait_of_warp(0), described(begin, 0, a...));
    }
    if constexpr (detail::IsVoid<decltype(primitive(ctx, a...))>::value) {
      primitive(ctx, a...);
      if (is_noted) {
        const TracedCall call = described(begin, platform::timer_ns(), a...);
        ends(call, call.value, ctx);
      }
    } else {
      const auto result = primitive(ctx, a...);
      if (is_noted) {
        const TracedCall call = described(begin, platform::timer_ns(), a...);
        ends(call, Word >= 0 ? (uint64_t)result : call.value, ctx);
      }
      return result;
    }
  }

private:
  template <class... A>
  TSN_DEVICE TracedCall described(uint64_t begin, uint64_t end, A... a) const {
    TracedCall call;
    call.begin_ns = begin;
    call.end_ns = end;
    call.word = Word < 0 ? kNoTracedWord : (uint64_t)detail::argument<Word>(a...);
    call.value = Word < 0 ? 0 : (uint64_t)detail::argument<Value>(a...);
    call.bytes = Bytes < 0 ? 0 : (uint64_t)detail::argument<Bytes>(a...);
    if constexpr (Rows >= 0) call.bytes *= (uint64_t)detail::argument<Rows>(a...);
    call.site = Site;
    call.pe = (int32_t)detail::argument<Pe>(a...);
    call.block = kernel.block();
    call.thread = kernel.thread();
    call.number = 0;
    return call;
  }

  // The value of a wait is the word that ended it, or the awaited value if an abort cut it short.
  TSN_DEVICE void ends(TracedCall call, uint64_t value, const Context* ctx) const {
    const uint64_t awaited = call.value;
    call.value = value;
    if (!Waits || S == Scope::block || call.end_ns - call.begin_ns >= kShortWaitNs) {
      kernel.write(call);
      kernel.claim();
    }
    if constexpr (Waits) {
      kernel.wait_of_warp(0)->end_ns = call.end_ns;
      if (TSN_UNLIKELY(call.end_ns - call.begin_ns > kLongWaitNs) && aborted(ctx))
        if (TracedCall* cut = kernel.wait_of_warp(1); cut->site == 0) {
          call.end_ns = 0;
          call.value = awaited;
          detail::store(cut, call);
        }
    }
  }
};

template <uint32_t Site, Scope S, bool Waits, int Pe, int Word, int Value, int Bytes, int Rows, class K, class F>
TSN_DEVICE Traced<Site, S, Waits, Pe, Word, Value, Bytes, Rows, K, F> traced(K& kernel, F primitive) {
  return {kernel, primitive};
}

} // namespace tsn

// TSN_TRACE_KERNEL is set with the kernel.
#define TSN_TRACED_KERNEL(site) tsn::TracedKernel<(uint32_t(TSN_TRACE_KERNEL) << 16) | (site)> tsn_traced
#define TSN_TRACED(site, scope, waits, pe, word, value, bytes, rows, ...)                                              \
  tsn::traced<(uint32_t(TSN_TRACE_KERNEL) << 16) | (site), scope, waits, pe, word, value, bytes, rows>(                \
      tsn_traced, [](const tsn::Context* ctx, auto... a) { return __VA_ARGS__(ctx, a...); })
