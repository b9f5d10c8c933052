// Calls of primitives on GPUs as events for TSN_TRACE. Kernels that are compiled while it is set include this file, and
// call primitives through TSN_TRACED; others have none of it.
#pragma once

#include "error.h"
#include "scope.h"

namespace tsn {

constexpr uint64_t kNoTracedWord = ~uint64_t(0);

// One call of a primitive, by the thread that leads it. trace/traced_calls.py reads these 64 bytes.
struct alignas(16) TracedCall {
  uint64_t begin_ns,
      end_ns;     // the GPU's clock; an end of 0: it has not ended, or was cut short when the job was aborted
  uint64_t word;  // heap offset of a signal word, or kNoTracedWord
  uint64_t value; // a wait's: wanted, and once it has ended the word as seen
  uint64_t bytes;
  uint32_t site; // number of the kernel << 16 | of the call in it
  int32_t pe;    // or -1
  uint32_t block, thread;
  uint64_t number; // how many calls began before
};
static_assert(sizeof(TracedCall) == 64, "trace/traced_calls.py reads 64 bytes a call");

// In device memory: a ring of calls that have ended, of which newer ones overwrite the oldest. Behind it two tables for
// the report of a hang, with a place for each warp: its last wait, and the first that was cut short by an abort.
struct TraceBuffer {
  uint64_t begun;    // calls so far
  uint64_t capacity; // of the ring, a power of two
  uint64_t reserved[14];
};
static_assert(sizeof(TraceBuffer) == 128, "trace/traced_calls.py expects the ring 128 bytes behind the start");
constexpr uint32_t kTracedBlocks = 1024; // blocks this far apart share their places in the table
constexpr uint32_t kTracedWarps = 32;
constexpr uint64_t kLongWaitNs = 1000000; // only waits as long as this are taken for cut short

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

template <class T>
struct IsVoid {
  static constexpr bool value = false;
};
template <>
struct IsVoid<void> {
  static constexpr bool value = true;
};

} // namespace detail

// A primitive that notes when it is called. Pe, Word, Value, Bytes and Rows say which argument behind the context is
// what; -1: none is. Waits: it may wait for other PEs, and goes to the table while it does.
//
// Nothing here waits for memory: the place in the ring is claimed ahead of the call and has arrived by its end, and
// that in the table is known.
template <uint32_t Site, Scope S, bool Waits, int Pe, int Word, int Value, int Bytes, int Rows, class F>
struct Traced {
  F primitive;

  template <class... A>
  TSN_DEVICE auto operator()(const Context* ctx, A... a) const {
    TraceBuffer* buffer = scope_leader<S>() ? (TraceBuffer*)platform::load_constant(&ctx->trace) : nullptr;
    uint64_t number = 0, begin = 0;
    if (buffer) {
      number = platform::atomic<AtomicOp::add, Order::relaxed, MemScope::gpu>(&buffer->begun, uint64_t(1));
      begin = platform::timer_ns();
      if constexpr (Waits) describe(*place(buffer, 0), 0, begin, 0, ctx, a...);
    }
    if constexpr (detail::IsVoid<decltype(primitive(ctx, a...))>::value) {
      primitive(ctx, a...);
      if (buffer) ends(buffer, number, begin, ctx, a...);
    } else {
      const auto result = primitive(ctx, a...);
      if (buffer) {
        TracedCall* noted = ends(buffer, number, begin, ctx, a...);
        if constexpr (Word >= 0) noted->value = (uint64_t)result;
      }
      return result;
    }
  }

private:
  TSN_DEVICE static TracedCall* ring(TraceBuffer* buffer) { return reinterpret_cast<TracedCall*>(buffer + 1); }

  TSN_DEVICE static TracedCall* place(TraceBuffer* buffer, uint32_t table) {
    const uint32_t warp = platform::thread_index() / platform::kWarpThreads % kTracedWarps;
    return ring(buffer) + platform::load_constant(&buffer->capacity) +
           (table * kTracedBlocks + platform::block_index() % kTracedBlocks) * kTracedWarps + warp;
  }

  template <class... A>
  TSN_DEVICE static void describe(TracedCall& place, uint64_t number, uint64_t begin, uint64_t end, const Context* ctx,
                                  A... a) {
    TracedCall call;
    const auto word = (uint64_t)detail::argument<Word>(a...);
    call.begin_ns = begin;
    call.end_ns = end;
    call.word = Word < 0 ? kNoTracedWord : word - platform::load_constant(&ctx->heap_base);
    call.value = Word < 0 ? 0 : (uint64_t)detail::argument<Value>(a...);
    call.bytes = Bytes < 0 ? 0 : (uint64_t)detail::argument<Bytes>(a...);
    if constexpr (Rows >= 0) call.bytes *= (uint64_t)detail::argument<Rows>(a...);
    call.site = Site;
    call.pe = (int32_t)detail::argument<Pe>(a...);
    call.block = platform::block_index();
    call.thread = platform::thread_index();
    call.number = number;
    place = call;
  }

  template <class... A>
  TSN_DEVICE static TracedCall* ends(TraceBuffer* buffer, uint64_t number, uint64_t begin, const Context* ctx, A... a) {
    const uint64_t end = platform::timer_ns();
    TracedCall* noted = ring(buffer) + (number & (platform::load_constant(&buffer->capacity) - 1));
    describe(*noted, number, begin, end, ctx, a...);
    if constexpr (Waits) {
      place(buffer, 0)->end_ns = end;
      if (TSN_UNLIKELY(end - begin > kLongWaitNs) && aborted(ctx))
        if (TracedCall* cut = place(buffer, 1); cut->site == 0) describe(*cut, number, begin, 0, ctx, a...);
    }
    return noted;
  }
};

template <uint32_t Site, Scope S, bool Waits, int Pe, int Word, int Value, int Bytes, int Rows, class F>
TSN_DEVICE Traced<Site, S, Waits, Pe, Word, Value, Bytes, Rows, F> traced(F primitive) {
  return {primitive};
}

} // namespace tsn

// TSN_TRACE_KERNEL is given with the kernel.
#define TSN_TRACED(site, scope, waits, pe, word, value, bytes, rows, ...)                                              \
  tsn::traced<(uint32_t(TSN_TRACE_KERNEL) << 16) | (site), scope, waits, pe, word, value, bytes, rows>(                \
      [](const tsn::Context* ctx, auto... a) { return __VA_ARGS__(ctx, a...); })
