#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/proxy/stats.h"

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
  // The entry is in the mailbox; the count that publishes it follows.
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

// The heap on a GPU: two streams of the driver, one per direction, beside any kernels that run.
//
// Positions: poll() has the stream write the number of its operations into pinned memory behind them, so reading the
// progress costs no call of the driver.
namespace {

using cuda::check;

// A stream, and its numbers of submitted and complete operations.
class Lane {
public:
  explicit Lane(uint32_t* flag, uint64_t flag_on_device) : flag_(flag), device_(flag_on_device) {
    check(cuda::driver().cuStreamCreate(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
  }
  ~Lane() {
    cuda::driver().cuStreamSynchronize(stream_);
    cuda::driver().cuStreamDestroy(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  cuda::Stream next() {
    position_++;
    return stream_;
  }
  uint64_t position() const { return position_; }
  uint64_t completed() const {
    completed_ += (uint32_t)(__atomic_load_n(flag_, __ATOMIC_ACQUIRE) - (uint32_t)completed_);
    return completed_;
  }
  void mark() {
    if (marked_ == position_) return;
    check(cuda::driver().cuStreamWriteValue32(stream_, device_, (uint32_t)position_, 0), "cuStreamWriteValue32");
    marked_ = position_;
  }
  void drain() {
    check(cuda::driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
    mark();
    check(cuda::driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

private:
  cuda::Stream stream_ = nullptr;
  uint32_t* flag_;
  uint64_t device_;
  uint64_t position_ = 0, marked_ = 0;
  mutable uint64_t completed_ = 0;
};

class CudaMemory final : public HeapMemory {
public:
  CudaMemory(uint64_t base, int device, int mailbox)
      : context_(device), d_(cuda::driver()), base_(base), pinned_(kPinnedBytes, true),
        in_(word<uint32_t>(0), pinned_.device()), out_(word<uint32_t>(128), pinned_.device() + 128),
        mailbox_(base + add_mailbox_offset(mailbox)), adds_(word<uint64_t>(kEntriesAt)) {
    flush_rdma_ = cuda::rdma_visibility(device) == cuda::RdmaVisibility::by_flush;
  }

  char* host() override { return nullptr; }

  void copy_out(void* to, uint64_t offset, uint64_t bytes) override {
    check(d_.cuMemcpyDtoHAsync(to, base_ + offset, bytes, out_.next()), "cuMemcpyDtoHAsync");
  }
  uint64_t out_position() const override { return out_.position(); }
  uint64_t out_completed() const override { return out_.completed(); }

  void copy_in(uint64_t offset, const void* from, uint64_t bytes) override {
    check(d_.cuMemcpyHtoDAsync(base_ + offset, from, bytes, in_.next()), "cuMemcpyHtoDAsync");
  }

  void write(uint64_t offset, const void* from, uint32_t bytes) override {
    if (bytes == 8 && offset % 8 == 0) {
      uint64_t v;
      std::memcpy(&v, from, 8);
      return check(d_.cuStreamWriteValue64(in_.next(), base_ + offset, v, 0), "cuStreamWriteValue64");
    }
    if (bytes == 4 && offset % 4 == 0) {
      uint32_t v;
      std::memcpy(&v, from, 4);
      return check(d_.cuStreamWriteValue32(in_.next(), base_ + offset, v, 0), "cuStreamWriteValue32");
    }
    // The driver copies later: the data wait in a ring of pinned slots.
    const uint64_t slot = writes_++ % kWriteSlots;
    if (write_position_[slot] > in_.completed()) in_.drain();
    char* piece = word<char>(kWritesAt + slot * kMaxWrite);
    std::memcpy(piece, from, bytes);
    copy_in(offset, piece, bytes);
    write_position_[slot] = in_.position();
  }

  void set(uint64_t offset, uint64_t value) override {
    settle_rdma();
    check(d_.cuStreamWriteValue64(in_.next(), base_ + offset, value, 0), "cuStreamWriteValue64");
  }

  void add(uint64_t offset, uint64_t value) override {
    settle_rdma();
    adds_.add(offset, value, [&](const uint64_t* entry, uint64_t index) { publish(entry, index); });
  }
  uint64_t in_position() const override { return in_.position(); }
  uint64_t in_completed() const override { return in_.completed(); }

  // A no-op if the GPU sees the writes of NICs in order.
  void settle_rdma() override {
    if (flush_rdma_)
      check(d_.cuFlushGPUDirectRDMAWrites(cuda::kFlushTargetCurrentContext, cuda::kFlushToOwner),
            "cuFlushGPUDirectRDMAWrites");
  }

  void apply_adds() override {
    in_.drain(); // the adds' data come first
    const AddMailbox::Sums sums = adds_.take(read(mailbox_ + 8 * kAddMailboxClaimed));
    asked_ = 0;
    for (const auto& [offset, sum] : sums)
      check(d_.cuStreamWriteValue64(in_.next(), base_ + offset, read(base_ + offset) + sum, 0), "cuStreamWriteValue64");
    for (const int word : {kAddMailboxClaimed, kAddMailboxAdded})
      check(d_.cuStreamWriteValue64(in_.next(), mailbox_ + 8 * word, adds_.published(), 0), "cuStreamWriteValue64");
    in_.drain();
  }

  void poll() override {
    if (adds_.crowded()) make_room();
    in_.mark();
    out_.mark();
  }

private:
  static constexpr uint64_t kWriteSlots = 64;
  static constexpr uint64_t kEntriesAt = 4096, kWritesAt = kEntriesAt + kAddMailboxEntries * 16;
  static constexpr uint64_t kPinnedBytes = kWritesAt + kWriteSlots * kMaxWrite;
  static constexpr uint64_t kClaimedAt = 256;

  template <class T>
  T* word(uint64_t at) {
    return reinterpret_cast<T*>(pinned_.data() + at);
  }

  // A word of the device, by way of the outgoing stream.
  uint64_t read(uint64_t address) {
    check(d_.cuMemcpyDtoHAsync(word<char>(kClaimedAt), address, 8, out_.next()), "cuMemcpyDtoHAsync");
    out_.drain();
    return __atomic_load_n(word<uint64_t>(kClaimedAt), __ATOMIC_RELAXED);
  }

  void publish(const uint64_t* entry, uint64_t index) {
    const uint64_t to = mailbox_ + 8 * (kAddMailboxHeader + 2 * (index % kAddMailboxEntries));
    check(d_.cuMemcpyHtoDAsync(to, entry, 16, in_.next()), "cuMemcpyHtoDAsync");
    check(d_.cuStreamWriteValue64(in_.next(), mailbox_, adds_.published(), 0), "cuStreamWriteValue64");
  }

  // The mailbox fills up: reads the device's progress in the background, and publishes the entries that fit. While no
  // kernel waits, nothing moves, so the read is not repeated at once.
  void make_room() {
    if (asked_ == 0) {
      const uint64_t now = now_ns();
      if (now < next_ask_) return;
      next_ask_ = now + 20000;
      check(d_.cuMemcpyDtoHAsync(word<char>(kClaimedAt), mailbox_ + 8 * kAddMailboxClaimed, 8, out_.next()),
            "cuMemcpyDtoHAsync");
      asked_ = out_.position();
    }
    if (out_.completed() < asked_) return;
    asked_ = 0;
    adds_.set_claimed(__atomic_load_n(word<uint64_t>(kClaimedAt), __ATOMIC_RELAXED),
                      [&](const uint64_t* entry, uint64_t index) { publish(entry, index); });
  }

  cuda::PrimaryContext context_;
  const cuda::Driver& d_;
  uint64_t base_;
  cuda::PinnedBlock pinned_;
  Lane in_, out_;
  uint64_t mailbox_;
  AddMailbox adds_;
  bool flush_rdma_ = false;
  uint64_t writes_ = 0, write_position_[kWriteSlots] = {};
  uint64_t asked_ = 0, next_ask_ = 0;
};

} // namespace

std::unique_ptr<HeapMemory> make_cuda_memory(uint64_t base, int device, int mailbox) {
  return std::make_unique<CudaMemory>(base, device, mailbox);
}

} // namespace tsn::proxy
