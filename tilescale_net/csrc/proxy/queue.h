// The consumer's side of a device queue; device/queue.h is the producer's.
//
// One proxy thread owns a HostQueue. pop() takes descriptors in the order of their positions; publish() returns the
// slots, once per batch; complete() writes the board on which flushes and gets wait.
#pragma once

#include "tilescale_net/device/context.h"
#include "tilescale_net/device/descriptor.h"

#include <cstddef>
#include <cstdint>

namespace tsn::proxy {

class HostQueue {
public:
  // Bytes of (page-aligned, pinned) host memory that a queue of `capacity` slots needs.
  static size_t memory_bytes(uint32_t capacity);

  // Lays the queue out in `memory` and prepares it for positions start, start + 1, … . `capacity` is a power of two.
  // The producer's `head` and `tail_cache` words must hold `start` too: that is the caller's part, they may be on a
  // GPU.
  HostQueue(void* memory, uint32_t capacity, uint64_t start = 0);

  // The device's view. Addresses are `device_memory` (the device's address of `memory`) plus offsets.
  QueueView view(uint64_t device_memory, uint64_t head, uint64_t tail_cache) const;

  // The next descriptor, if it has arrived whole.
  bool pop(Request* out) {
    uint64_t* slot = slots_ + (position_ & mask_) * 4;
    const uint64_t parity = parity_of(position_, mask_);
    Descriptor d = {};
    d.word[0] = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    if ((d.word[0] & 1) != parity) return false;
    d.word[1] = __atomic_load_n(slot + 1, __ATOMIC_RELAXED);
    if (has_second_half(command_of(d.word[0]))) {
      d.word[2] = __atomic_load_n(slot + 2, __ATOMIC_ACQUIRE);
      if ((d.word[2] & 1) != parity) return false;
      d.word[3] = __atomic_load_n(slot + 3, __ATOMIC_RELAXED);
    } else {
      // No thread wrote half b in this lap; stale contents would look new in the next one.
      __atomic_store_n(slot + 2, parity, __ATOMIC_RELAXED);
    }
    __builtin_prefetch(slots_ + ((position_ + 8) & mask_) * 4);
    *out = decode(d);
    position_++;
    return true;
  }

  // Command of the next descriptor, which stays in the queue; Command::none when the queue is empty.
  Command peek() const {
    const uint64_t word = __atomic_load_n(slots_ + (position_ & mask_) * 4, __ATOMIC_ACQUIRE);
    return (word & 1) == parity_of(position_, mask_) ? command_of(word) : Command::none;
  }

  // Lets producers reuse the slots of everything popped so far.
  void publish() {
    if (published_ == position_) return;
    published_ = position_;
    __atomic_store_n(tail_, position_, __ATOMIC_RELEASE);
  }

  // Marks the operation of the ticket at `position` complete, for the ticket's waiters. Entries are shared by positions
  // one lap apart, so an earlier ticket must be completed before a later one of the same entry is popped. Any thread.
  void complete(uint64_t position) { __atomic_store_n(done_ + (position & mask_), position + 1, __ATOMIC_RELEASE); }

  uint64_t position() const { return position_; }
  uint32_t capacity() const { return (uint32_t)mask_ + 1; }

private:
  uint64_t* slots_;
  uint64_t* done_;
  uint64_t* tail_;
  uint64_t mask_;
  uint64_t position_;
  uint64_t published_;
  char* memory_;
};

} // namespace tsn::proxy
