// The local heap as a proxy thread touches it: with plain stores when it is host memory, through copy streams of the
// CUDA driver when it is on a GPU.
//
// Incoming work (copy_in, write, set, add) takes effect in the order of the calls, as kernels see it, but perhaps
// later: in_position() counts the calls so far, and everything before in_completed() has taken effect. Outgoing copies
// have the same pair. poll() must be called once per round of the proxy's loop.
#pragma once

#include "tilescale_net/device/context.h"

#include <cstdint>
#include <memory>

namespace tsn::proxy {

class HeapMemory {
public:
  virtual ~HeapMemory() = default;

  // The heap when the host can read and write it directly, else nullptr.
  virtual char* host() = 0;

  // `to` is pinned host memory and holds the data once out_completed() has passed.
  virtual void copy_out(void* to, uint64_t offset, uint64_t bytes) = 0;
  virtual uint64_t out_position() const = 0;
  virtual uint64_t out_completed() const = 0;

  // `from` is pinned host memory and must stay as it is until in_completed() has passed.
  virtual void copy_in(uint64_t offset, const void* from, uint64_t bytes) = 0;
  // `from` is any memory; it may be reused on return. At most kMaxWrite bytes.
  static constexpr uint32_t kMaxWrite = 1024;
  virtual void write(uint64_t offset, const void* from, uint32_t bytes) = 0;
  // Signal words: all earlier incoming work, and the peers' RDMA writes whose arrival this thread has seen, are visible
  // to any thread that acquires the new value.
  virtual void set(uint64_t offset, uint64_t value) = 0;
  virtual void add(uint64_t offset, uint64_t value) = 0;
  virtual uint64_t in_position() const = 0;
  virtual uint64_t in_completed() const = 0;

  // What NICs have written, by peers' writes and own reads whose end this thread has seen, becomes visible to kernels.
  virtual void settle_rdma() = 0;
  // Carries out the adds that were left to kernels so far. Only while no kernel runs that may touch the words: not here
  // and not at a peer that reaches them directly.
  virtual void apply_adds() = 0;

  virtual void poll() = 0;
};

std::unique_ptr<HeapMemory> make_host_memory(void* base);
// The same, except adds: they are left to waiting kernels, as by make_cuda_memory().
std::unique_ptr<HeapMemory> make_host_memory_with_mailbox(void* base, int mailbox);

// For the thread that calls it: makes the device's primary context current. `mailbox` is the number of
// the add mailbox (device/add_mailbox.h) that this object alone fills. Throws CudaError.
std::unique_ptr<HeapMemory> make_cuda_memory(uint64_t base, int device, int mailbox);

} // namespace tsn::proxy
