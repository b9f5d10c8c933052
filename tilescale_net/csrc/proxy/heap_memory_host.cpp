#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/device/add_mailbox.h"

#include <cstring>
#include <unordered_map>

namespace tsn::proxy {
namespace {

template <class T>
void store(char* to, const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  __atomic_store_n(reinterpret_cast<T*>(to), value, __ATOMIC_RELAXED);
}

// Everything takes effect at once.
class HostMemory : public HeapMemory {
public:
  explicit HostMemory(void* base) : base_(static_cast<char*>(base)) {}

  char* host() override { return base_; }

  void copy_out(void* to, uint64_t offset, uint64_t bytes) override {
    std::memcpy(to, base_ + offset, bytes);
    out_++;
  }
  uint64_t out_position() const override { return out_; }
  uint64_t out_completed() const override { return out_; }

  void copy_in(uint64_t offset, const void* from, uint64_t bytes) override {
    std::memcpy(base_ + offset, from, bytes);
    in_++;
  }

  void write(uint64_t offset, const void* from, uint32_t bytes) override {
    in_++;
    char* to = base_ + offset;
    // A value that fits a machine word is seen as a whole.
    if (bytes == 8 && offset % 8 == 0) return store<uint64_t>(to, from);
    if (bytes == 4 && offset % 4 == 0) return store<uint32_t>(to, from);
    if (bytes == 2 && offset % 2 == 0) return store<uint16_t>(to, from);
    std::memcpy(to, from, bytes);
  }

  void set(uint64_t offset, uint64_t value) override {
    in_++;
    __atomic_store_n(reinterpret_cast<uint64_t*>(base_ + offset), value, __ATOMIC_RELEASE);
  }
  // Atomic with respect to the peers of this node, which add to the same shared memory.
  void add(uint64_t offset, uint64_t value) override {
    in_++;
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(base_ + offset), value, __ATOMIC_RELEASE);
  }
  uint64_t in_position() const override { return in_; }
  uint64_t in_completed() const override { return in_; }

  void settle_rdma() override {}
  void apply_adds() override {}
  void poll() override {}

protected:
  uint64_t* word(uint64_t offset) { return reinterpret_cast<uint64_t*>(base_ + offset); }

private:
  char* base_;
  uint64_t in_ = 0, out_ = 0;
};

// Adds are left to waiting kernels, as on GPUs.
class HostMemoryWithMailbox final : public HostMemory {
public:
  HostMemoryWithMailbox(void* base, int box)
      : HostMemory(base), box_(word(8ull * (uint64_t)(kAddMailboxWords + box * kAddMailboxStride))) {}

  void add(uint64_t offset, uint64_t value) override {
    // Adds commute: when the box is full, those to one word become one.
    if (!waiting_.empty() || full()) waiting_[offset] += value;
    else publish(offset, value);
  }

  void apply_adds() override {
    uint64_t claimed = claimed_by_kernels();
    for (; claimed != published_; claimed++) {
      const uint64_t* entry = entry_of(claimed);
      HostMemory::add(entry[0], entry[1]);
    }
    __atomic_store_n(box_ + kAddMailboxClaimed, claimed, __ATOMIC_RELEASE);
    for (const auto& [offset, value] : waiting_) HostMemory::add(offset, value);
    waiting_.clear();
  }

  void poll() override {
    while (!waiting_.empty() && !full()) {
      publish(waiting_.begin()->first, waiting_.begin()->second);
      waiting_.erase(waiting_.begin());
    }
  }

private:
  uint64_t claimed_by_kernels() const { return __atomic_load_n(box_ + kAddMailboxClaimed, __ATOMIC_ACQUIRE); }
  bool full() const { return published_ - claimed_by_kernels() == kAddMailboxEntries; }
  uint64_t* entry_of(uint64_t index) { return box_ + kAddMailboxHeader + 2 * (index % kAddMailboxEntries); }

  void publish(uint64_t offset, uint64_t value) {
    uint64_t* entry = entry_of(published_++);
    // A kernel may still look at the entry's last content, and finds out afterwards that it has been claimed.
    __atomic_store_n(entry, offset, __ATOMIC_RELAXED);
    __atomic_store_n(entry + 1, value, __ATOMIC_RELAXED);
    __atomic_store_n(box_, published_, __ATOMIC_RELEASE);
  }

  uint64_t* box_;
  uint64_t published_ = 0;
  std::unordered_map<uint64_t, uint64_t> waiting_; // sums by offset
};

} // namespace

std::unique_ptr<HeapMemory> make_host_memory(void* base) { return std::make_unique<HostMemory>(base); }

std::unique_ptr<HeapMemory> make_host_memory_with_mailbox(void* base, int box) {
  return std::make_unique<HostMemoryWithMailbox>(base, box);
}

} // namespace tsn::proxy
