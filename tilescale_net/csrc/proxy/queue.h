// The consumer's side of a device queue; device/queue.h is the producer's.
//
// One proxy thread owns a HostQueue. pop() takes descriptors in the order of their positions; publish() returns the
// slots, once per batch; complete() writes the board on which flushes and gets wait.
#pragma once

#include "tilescale_net/csrc/common/base.h"
#include "tilescale_net/device/context.h"
#include "tilescale_net/device/descriptor.h"

namespace tsn::proxy {

class HostQueue {
public:
  // Bytes of (page-aligned, pinned) host memory that a queue of `capacity` slots needs.
  static size_t memory_bytes(uint32_t capacity) {
    return capacity * (sizeof(Descriptor) + sizeof(uint64_t)) + 2 * kLine;
  }

  // Lays the queue out in `memory` and prepares it for positions start, start + 1, … . `capacity` is a power of two.
  // The producer's `head` and `tail_cache` words must hold `start` too: that is the caller's part, they may be on a
  // GPU.
  HostQueue(void* memory, uint32_t capacity, uint64_t start = 0)
      : mask_(capacity - 1), position_(start), published_(start), memory_(static_cast<char*>(memory)) {
    if (capacity < 2 || (capacity & (capacity - 1)))
      throw std::invalid_argument(concat("queue capacity ", capacity, " is not a power of two of at least 2"));
    if (reinterpret_cast<uintptr_t>(memory) % kLine)
      throw std::invalid_argument(concat("queue memory is not aligned to ", kLine, " bytes"));
    slots_ = reinterpret_cast<uint64_t*>(memory_);
    done_ = slots_ + capacity * 4ull;
    tail_ = reinterpret_cast<uint64_t*>(memory_ + capacity * 40ull + kLine - capacity * 40ull % kLine);
    for (uint64_t i = 0; i < capacity; i++) {
      const uint64_t position = start + i;
      uint64_t* slot = slots_ + (position & mask_) * 4;
      slot[0] = slot[2] = parity_of(position, mask_) ^ 1;
      slot[1] = slot[3] = 0;
      done_[i] = start; // complete for no position that is still to come
    }
    *tail_ = start;
  }

  // The device's view. Addresses are `device_memory` (the device's address of `memory`) plus offsets.
  QueueView view(uint64_t device_memory, uint64_t head, uint64_t tail_cache) const {
    auto device = [&](const void* p) { return device_memory + (static_cast<const char*>(p) - memory_); };
    QueueView v = {};
    v.slots = device(slots_);
    v.tail = device(tail_);
    v.head = head;
    v.tail_cache = tail_cache;
    v.done = device(done_);
    v.mask = mask_;
    return v;
  }

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
  static constexpr size_t kLine =
      128; // the tail has lines of its own: the device reads it while slots and board are written

  uint64_t* slots_;
  uint64_t* done_;
  uint64_t* tail_;
  uint64_t mask_;
  uint64_t position_;
  uint64_t published_;
  char* memory_;
};

} // namespace tsn::proxy
