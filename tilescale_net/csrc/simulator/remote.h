// Remote writes that have been issued and not yet delivered.
//
// The memory model lets a put become visible long after it was issued; real machines almost never do that, so kernels
// pass there that will fail one day. Here operations wait in a list of this process and reach the peer's heap as
// late, and in as odd an order, as the model permits:
//   - data of puts arrives in pieces, in any order, and is read from the source when it arrives;
//   - the signal of a put_signal follows all pieces of its own put, and may overtake any other put;
//   - a signal sent after a fence follows everything issued to that PE before the fence;
//   - signals to one word arrive in the order in which they were issued;
//   - atomic operations without a result are like signals, others happen at once, after the operations that signals
//   wait for; - quiet delivers everything.
// Everything is delivered in the end, even after the last kernel.
#pragma once

#include "race_memory.h"
#include "random.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn::sim {

enum class Visibility { eager, late, random };
void set_visibility(Visibility visibility);

extern const RemoteApi kRemoteApi;

// An operation, with the data for its delivery.
struct Late {
  RemoteOperation operation;
  std::unique_ptr<char[]> copy; // of a source that may be gone at delivery
  RaceMemory* memory = nullptr; // where `message` goes when the signal is delivered
  Message message;

  void keep_source();
  void deliver(uint64_t at, uint64_t bytes) const; // of its data
  void deliver_signal() const;
  // f(offset at the target, offset at the source, bytes) for each run of the bytes `at` to `at + size` of the data,
  // counted row after row.
  template <typename F>
  void each_run(uint64_t at, uint64_t size, F f) const;
};

template <typename F>
void Late::each_run(uint64_t at, uint64_t size, F f) const {
  const RemoteOperation& o = operation;
  if (o.rows <= 1) return f(at, at, size);
  const uint64_t row_bytes = static_cast<uint64_t>(o.bytes / o.rows);
  while (size) {
    const uint64_t row = at / row_bytes, column = at % row_bytes, run = std::min(size, row_bytes - column);
    f(row * static_cast<uint64_t>(o.pitch) + column, row * static_cast<uint64_t>(o.source_pitch) + column, run);
    at += run, size -= run;
  }
}

// Called by the scheduler when threads only poll or rounds have passed; `must` requires progress if there is any left
// to make. Returns whether something was delivered.
bool remote_progress(Random& random, bool must);

void remote_kernel_begin();
// At the end of a kernel: operations outlive it, for a while.
void remote_kernel_end(Random& random);

// Delivers everything that is pending in this process.
void flush_pending();

// Operations waiting for delivery.
uint64_t pending_operations();

} // namespace tsn::sim
