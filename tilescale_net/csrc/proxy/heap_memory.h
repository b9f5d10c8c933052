// The local heap for a proxy thread: plain stores if it is host memory, copy streams of the CUDA driver if it is on a
// GPU.
//
// Incoming work (copy_in, write, set, add) takes effect in the order of the calls, as kernels see it, but perhaps
// later: in_position() counts the calls so far, and everything before in_completed() has taken effect. Outgoing copies
// have the same pair. poll() must be called once per round of the proxy's loop.
#pragma once

#include "tilescale_net/csrc/common/base.h"
#include "tilescale_net/device/add_mailbox.h"
#include "tilescale_net/device/context.h"

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

  // `from` is pinned host memory and must stay unchanged until in_completed() has passed.
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

  // Makes NICs' writes, of peers' writes and own reads that this thread has seen complete, visible to kernels.
  virtual void settle_rdma() = 0;
  // Applies the adds that were deferred to kernels so far. Only while no kernel runs that may touch the words:
  // neither here nor at a peer that reaches them directly.
  virtual void apply_adds() = 0;

  virtual void poll() = 0;
};

std::unique_ptr<HeapMemory> make_host_memory(void* base);
// The same, except adds: they are deferred to waiting kernels, as by make_cuda_memory().
std::unique_ptr<HeapMemory> make_host_memory_with_mailbox(void* base, int mailbox);

// For the thread that calls it: makes the device's primary context current. `mailbox` is the number of
// the add mailbox (device/add_mailbox.h) that this object alone fills. Throws CudaError.
std::unique_ptr<HeapMemory> make_cuda_memory(uint64_t base, int device, int mailbox);

// The host's side of an add mailbox (device/add_mailbox.h): published adds, and adds that wait for room. The owner
// brings words into the heap.
// Heap offset of mailbox `number`, in bytes.
inline uint64_t add_mailbox_offset(int number) {
  return 8ull * (uint64_t)(kAddMailboxWords + number * kAddMailboxStride);
}

class AddMailbox {
public:
  using Sums = std::unordered_map<uint64_t, uint64_t>; // by heap offset

  // `entries`: kAddMailboxEntries pairs of words that the host can read; the mailbox's own or a copy of them.
  explicit AddMailbox(uint64_t* entries) : entries_(entries) {}

  bool full() const { return published_ - claimed_ == kAddMailboxEntries; }
  // Whether the kernels' progress should be read.
  bool crowded() const { return published_ - claimed_ > kAddMailboxEntries / 2 || !waiting_.empty(); }
  uint64_t published() const { return published_; }

  // `publish(entry, index)`: entry number `index` is in `entries`, and published() counts it.
  template <class Publish>
  void add(uint64_t offset, uint64_t value, Publish publish) {
    // Adds commute: when the mailbox is full, those to one word become one.
    if (!waiting_.empty() || full()) waiting_[offset] += value;
    else put(offset, value, publish);
  }

  // Kernels have claimed the first `claimed` entries: publishes the adds that fit now.
  template <class Publish>
  void set_claimed(uint64_t claimed, Publish publish) {
    claimed_ = claimed;
    while (!waiting_.empty() && !full()) {
      put(waiting_.begin()->first, waiting_.begin()->second, publish);
      waiting_.erase(waiting_.begin());
    }
  }

  // All adds that no kernel has claimed; kernels have claimed the first `claimed`. They count as claimed from now on.
  Sums take(uint64_t claimed) {
    Sums sums = std::exchange(waiting_, {});
    for (; claimed != published_; claimed++) {
      const uint64_t* entry = entry_of(claimed);
      sums[entry[0]] += entry[1];
    }
    claimed_ = published_;
    return sums;
  }

private:
  uint64_t* entry_of(uint64_t index) { return entries_ + 2 * (index % kAddMailboxEntries); }

  template <class Publish>
  void put(uint64_t offset, uint64_t value, Publish publish) {
    const uint64_t index = published_++;
    uint64_t* entry = entry_of(index);
    // A kernel may still read the entry's old content, and detects afterwards that it has been claimed.
    __atomic_store_n(entry, offset, __ATOMIC_RELAXED);
    __atomic_store_n(entry + 1, value, __ATOMIC_RELAXED);
    publish(entry, index);
  }

  uint64_t* entries_;
  uint64_t published_ = 0, claimed_ = 0;
  Sums waiting_;
};

} // namespace tsn::proxy
