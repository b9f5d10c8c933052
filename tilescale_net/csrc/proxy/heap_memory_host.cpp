#include "tilescale_net/csrc/proxy/add_mailbox.h"
#include "tilescale_net/csrc/proxy/heap_memory.h"

#include <cstring>

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
  HostMemoryWithMailbox(void* base, int mailbox)
      : HostMemory(base), mailbox_(word(add_mailbox_offset(mailbox))), adds_(mailbox_ + kAddMailboxHeader) {}

  void add(uint64_t offset, uint64_t value) override {
    if (adds_.full()) make_room();
    adds_.add(offset, value, Publish{mailbox_});
  }

  void apply_adds() override {
    for (const auto& [offset, sum] : adds_.take(claimed())) HostMemory::add(offset, sum);
    for (const int word : {kAddMailboxClaimed, kAddMailboxAdded})
      __atomic_store_n(mailbox_ + word, adds_.published(), __ATOMIC_RELEASE);
  }

  void poll() override {
    if (adds_.crowded()) make_room();
  }

private:
  // The entry is in the mailbox; what makes it count comes behind it.
  struct Publish {
    uint64_t* mailbox;
    void operator()(const uint64_t*, uint64_t index) const { __atomic_store_n(mailbox, index + 1, __ATOMIC_RELEASE); }
  };

  uint64_t claimed() const { return __atomic_load_n(mailbox_ + kAddMailboxClaimed, __ATOMIC_ACQUIRE); }
  void make_room() { adds_.set_claimed(claimed(), Publish{mailbox_}); }

  uint64_t* mailbox_;
  AddMailbox adds_;
};

} // namespace

std::unique_ptr<HeapMemory> make_host_memory(void* base) { return std::make_unique<HostMemory>(base); }

std::unique_ptr<HeapMemory> make_host_memory_with_mailbox(void* base, int mailbox) {
  return std::make_unique<HostMemoryWithMailbox>(base, mailbox);
}

} // namespace tsn::proxy
