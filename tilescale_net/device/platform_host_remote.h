// Bulk copies and deferral of platform.h on a CPU. Part of platform_host.h, which includes it.
#pragma once

namespace tsn {
namespace platform {

// ------------------------------------------------------------------------------------------------------ bulk copies

namespace detail {

// An mbarrier: the phases that have ended, the bytes that the running one expects, and the loads that it counts. A
// load happens when a thread waits for it, so a premature read of a stage finds the old data.
struct Stage {
  struct Load {
    void* shared;
    const void* global;
    uint32_t bytes;
  };
  uint32_t phases, expected, n;
  Load loads[2];
};
constexpr int kStagesId = 1 << 20; // beyond the numbers of a kernel's own declarations

TSN_DEVICE Stage* stage(uint64_t* barrier) { return reinterpret_cast<Stage*>(*barrier); }

} // namespace detail

template <int Stages>
TSN_DEVICE uint64_t* stage_barriers() {
  struct Ring {
    uint64_t words[Stages];
    detail::Stage stages[Stages];
  };
  Ring& ring = sim::static_shared<Ring>(detail::kStagesId + Stages);
  for (int i = 0; i < Stages; i++) ring.words[i] = reinterpret_cast<uint64_t>(&ring.stages[i]);
  return ring.words;
}

TSN_DEVICE void barrier_init(uint64_t* barrier) { *detail::stage(barrier) = detail::Stage(); }
TSN_DEVICE void barrier_retire(uint64_t* barrier) {
  if (detail::stage(barrier)->n) sim::api().trap("an mbarrier is retired before its bulk loads were waited for");
}
TSN_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) { detail::stage(barrier)->expected += bytes; }

TSN_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  detail::Stage& s = *detail::stage(barrier);
  if ((s.phases & 1) != parity) return; // the phase of that parity has ended
  for (uint32_t i = 0; i < s.n; i++) {
    memcpy(s.loads[i].shared, s.loads[i].global, s.loads[i].bytes);
    s.expected -= s.loads[i].bytes;
  }
  if (!s.n || s.expected) sim::api().trap("wait for a bulk load that was not issued, or not with the expected size");
  s.n = 0;
  s.phases++;
  sim::maybe_yield();
}

TSN_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  detail::Stage& s = *detail::stage(barrier);
  const uint64_t aligned = reinterpret_cast<uint64_t>(shared) | reinterpret_cast<uint64_t>(global) | bytes;
  if (aligned % 16) sim::api().trap("a bulk load is not aligned to 16 bytes");
  if (s.n == sizeof(s.loads) / sizeof(s.loads[0])) sim::api().trap("too many bulk loads on one mbarrier");
  s.loads[s.n++] = {shared, global, bytes};
}

TSN_DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
  const uint64_t aligned = reinterpret_cast<uint64_t>(shared) | reinterpret_cast<uint64_t>(global) | bytes;
  if (aligned % 16) sim::api().trap("a bulk store is not aligned to 16 bytes");
  memcpy(global, shared, bytes);
  sim::maybe_yield();
}
TSN_DEVICE void bulk_commit() {}
template <int N>
TSN_DEVICE void bulk_wait_read() {}
template <int N>
TSN_DEVICE void bulk_wait() {}
TSN_DEVICE void bulk_publish() {}
TSN_DEVICE void bulk_fence() {}

// --------------------------------------------------------------------------------------------------------- deferral

TSN_DEVICE bool defer_put_signal(const Context*, void* dst, void* peer, const void* src, int64_t bytes, int pe,
                                 uint64_t* signal, uint64_t* peer_signal, uint64_t value, SignalOp op) {
  return sim::api().remote->defer(
      {"put_signal", dst, peer, src, bytes, value, signal, peer_signal, op == SignalOp::add, pe});
}
TSN_DEVICE bool defer_put_rows(const Context*, void* dst, void* peer, const void* src, int64_t rows, int64_t bytes,
                               int64_t dst_pitch, int64_t src_pitch, int pe, uint64_t* signal, uint64_t* peer_signal,
                               uint64_t value, SignalOp op) {
  return sim::api().remote->defer({signal ? "put_signal" : "put", dst, peer, src, rows * bytes, value, signal,
                                   peer_signal, op == SignalOp::add, pe, rows, dst_pitch, src_pitch});
}
TSN_DEVICE bool defer_put(const Context*, void* dst, void* peer, const void* src, int64_t bytes, int pe) {
  return sim::api().remote->defer({"put", dst, peer, src, bytes, 0, nullptr, nullptr, false, pe});
}
TSN_DEVICE bool defer_put_value(const Context*, void* dst, void* peer, uint64_t value, int bytes, int pe) {
  return sim::api().remote->defer({"put_value", dst, peer, nullptr, bytes, value, nullptr, nullptr, false, pe});
}
TSN_DEVICE bool defer_signal(const Context*, uint64_t* signal, uint64_t* peer_signal, uint64_t value, SignalOp op,
                             int pe) {
  return sim::api().remote->defer(
      {"signal", nullptr, nullptr, nullptr, 0, value, signal, peer_signal, op == SignalOp::add, pe});
}

namespace detail {

template <class T>
constexpr sim::Number number_of() {
  constexpr bool wide = sizeof(T) == 8;
  if constexpr (T(0.5) != T(0)) return wide ? sim::Number::float64 : sim::Number::float32;
  if constexpr (T(-1) < T(0)) return wide ? sim::Number::int64 : sim::Number::int32;
  return wide ? sim::Number::uint64 : sim::Number::uint32;
}

} // namespace detail

// An immediate access, after operations that a fence, or the same word, orders before it.
TSN_DEVICE void reach(const void* word, bool changes) { sim::api().remote->reach(word, changes); }

// An atomic with an unused result happens later, like a signal. Others, and those on this PE's own memory, are done
// when they return; they may still overtake every put.
template <class T>
TSN_DEVICE bool defer_atomic(const Context*, AtomicOp op, T* dst, T* peer, T value, int pe, T* old) {
  if (dst == peer) sim::note_local(peer, sizeof(T), sim::LocalAccess::atomic, nullptr);
  if (sim::self().uses_result || dst == peer) return reach(peer, true), false;
  constexpr sim::Number kNumber = detail::number_of<T>();
  const bool commutes = op == AtomicOp::add && kNumber < sim::Number::float32;
  sim::RemoteOperation operation{"atomic", nullptr, nullptr, nullptr, 0, detail::bits<WordOf<T>>(value)};
  operation.signal = reinterpret_cast<uint64_t*>(dst);
  operation.peer_signal = reinterpret_cast<uint64_t*>(peer);
  operation.add = commutes;
  operation.pe = pe;
  operation.number = kNumber;
  operation.atomic = uint32_t(op);
  *old = T(0);
  return sim::api().remote->defer(operation);
}
template <class T>
TSN_DEVICE bool defer_atomic_cas(const Context*, T* dst, T* peer, T, T, int, T*) {
  if (dst == peer) sim::note_local(peer, sizeof(T), sim::LocalAccess::atomic, nullptr);
  return reach(peer, true), false;
}

TSN_DEVICE void announce(Operation operation, Scope scope, const void* dst, const void* src, int64_t bytes, int pe,
                         const uint64_t* sig, uint64_t value, SignalOp op, int64_t rows, int64_t dst_pitch,
                         int64_t src_pitch) {
  sim::api().remote->announce(
      {operation, uint32_t(scope), dst, src, bytes, pe, sig, value, op == SignalOp::add, rows, dst_pitch, src_pitch});
}
TSN_DEVICE void begin(Operation operation, Scope scope, const void* dst, const void* src, int64_t bytes, int pe,
                      const uint64_t* sig, uint64_t value, SignalOp op, int64_t rows, int64_t dst_pitch,
                      int64_t src_pitch) {
  sim::api().remote->begin(
      {operation, uint32_t(scope), dst, src, bytes, pe, sig, value, op == SignalOp::add, rows, dst_pitch, src_pitch});
}
TSN_DEVICE void signalling(const uint64_t* sig, int pe, uint64_t value, SignalOp op) {
  sim::api().remote->signalling(sig, pe, value, op == SignalOp::add);
}
TSN_DEVICE void flushed(uint64_t ticket, bool ended) { sim::api().remote->flushed(ticket, ended); }
TSN_DEVICE void benign_race(const void* p, int64_t bytes) { sim::api().remote->benign_race(p, uint64_t(bytes)); }
TSN_DEVICE void expect_empty(const Vec16* peer) {
  check_aligned(peer);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(peer);
  uint32_t left = 0;
  for (int i = 0; i < 4; i++) left |= __atomic_load_n(words + i, __ATOMIC_RELAXED);
  if (left)
    sim::api().trap("put_vector writes to memory that is not empty: take_vectors has not taken the vector before");
}
TSN_DEVICE void waited(const uint64_t* sig) { sim::api().remote->waited(sig); }

TSN_DEVICE void inspect(Operation operation, const void* local, int64_t bytes) {
  sim::api().remote->check(kOperationNames[operation], local, uint64_t(bytes));
}

TSN_DEVICE bool defer_fence(const Context*, int pe) {
  sim::api().remote->fence(pe);
  return false; // the caller's own writes to mapped memory also need the host's fence
}
TSN_DEVICE bool defer_quiet(const Context*, int pe) {
  sim::api().remote->quiet(pe);
  return false;
}

// ----------------------------------------------------------------------------------------------------- reports

TSN_DEVICE void wait_begins(Operation operation, int pe, const uint64_t* word, uint64_t wanted, uint32_t comparison) {
  sim::api().trace->wait_begins({operation, pe, word, int64_t(wanted), comparison});
}
TSN_DEVICE bool waits_without_a_look() { return sim::self().scheduled; }
TSN_DEVICE void wait_ends() { sim::api().trace->wait_ends(); }
TSN_DEVICE uint32_t line() { return uint32_t(sim::self().site + 1); }
TSN_DEVICE void gives_up() { sim::api().trace->gives_up(); }
TSN_DEVICE void range_begins() { sim::api().trace->range_begins(); }
TSN_DEVICE void range_ends() { sim::api().trace->range_ends(); }

} // namespace platform
} // namespace tsn
