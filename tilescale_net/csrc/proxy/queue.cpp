#include "tilescale_net/csrc/proxy/queue.h"

#include <stdexcept>
#include <string>

namespace tsn::proxy {
namespace {

constexpr size_t kLine = 128; // tail lives in lines of its own: the device reads it while slots and board are written

} // namespace

size_t HostQueue::memory_bytes(uint32_t capacity) {
  return capacity * (sizeof(Descriptor) + sizeof(uint64_t)) + 2 * kLine;
}

HostQueue::HostQueue(void* memory, uint32_t capacity, uint64_t start)
    : mask_(capacity - 1), position_(start), published_(start), memory_(static_cast<char*>(memory)) {
  if (capacity < 2 || (capacity & (capacity - 1)))
    throw std::invalid_argument("queue capacity " + std::to_string(capacity) + " is not a power of two of at least 2");
  if (reinterpret_cast<uintptr_t>(memory) % kLine)
    throw std::invalid_argument("queue memory is not aligned to " + std::to_string(kLine) + " bytes");
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

QueueView HostQueue::view(uint64_t device_memory, uint64_t head, uint64_t tail_cache) const {
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

} // namespace tsn::proxy
