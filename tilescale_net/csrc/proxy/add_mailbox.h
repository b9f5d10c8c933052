// The host's half of an add mailbox (device/add_mailbox.h): which adds are published, and which wait for room. The
// owner brings words into the heap.
#pragma once

#include "tilescale_net/device/add_mailbox.h"

#include <unordered_map>
#include <utility>

namespace tsn::proxy {

// Where mailbox `number` begins in the heap, in bytes.
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

  // Kernels have claimed the first `claimed` entries: publishes what fits now.
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
    // A kernel may still look at the entry's last content, and finds out afterwards that it has been claimed.
    __atomic_store_n(entry, offset, __ATOMIC_RELAXED);
    __atomic_store_n(entry + 1, value, __ATOMIC_RELAXED);
    publish(entry, index);
  }

  uint64_t* entries_;
  uint64_t published_ = 0, claimed_ = 0;
  Sums waiting_;
};

} // namespace tsn::proxy
