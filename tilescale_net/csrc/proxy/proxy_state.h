// What the threads of one proxy share: failure and abort, and tickets that several queues complete together.
#pragma once

#include "tilescale_net/csrc/proxy/failure.h"
#include "tilescale_net/csrc/proxy/handover.h"
#include "tilescale_net/csrc/proxy/options.h"
#include "tilescale_net/csrc/proxy/queue.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace tsn::proxy {

// A device queue, and which entries of its board belong to a ticket that is still open.
struct TrackedQueue {
  TrackedQueue(void* memory, uint32_t capacity, uint64_t start)
      : host(memory, capacity, start), open(new std::atomic<uint8_t>[capacity]()) {}
  bool is_open(uint64_t position) const {
    return open[position & (host.capacity() - 1)].load(std::memory_order_acquire) != 0;
  }
  void begin(uint64_t position) { open[position & (host.capacity() - 1)].store(1, std::memory_order_relaxed); }
  // Notifies the device, then frees the entry. Any thread.
  void complete(uint64_t position) {
    host.complete(position);
    open[position & (host.capacity() - 1)].store(0, std::memory_order_release);
  }
  HostQueue host;
  std::unique_ptr<std::atomic<uint8_t>[]> open;
};

class ProxyState {
public:
  explicit ProxyState(const ProxyOptions& o)
      : options(o), excused_(new std::atomic<bool>[(size_t)std::max(o.n_pes, 1)]()) {}

  const ProxyOptions& options;
  std::vector<std::unique_ptr<TrackedQueue>> queues;
  std::vector<std::unique_ptr<Inbox>> inboxes; // of the threads, where several serve one peer
  std::atomic<int> calm{0};                    // threads that have nothing left to do, while stopping
  std::atomic<uint64_t> drains{0};             // calls of Proxy::drain() so far
  std::atomic<uint64_t> settles{0};            // calls of Proxy::apply_adds() so far
  std::atomic<bool> stopping{false};           // by the owner: finish what is there, then end
  std::atomic<bool> failed{false};             // by any thread: end now

  // The first failure is kept; the device's waits and all threads end.
  void fail(Failure failure) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failed.load(std::memory_order_relaxed)) return;
      failure_ = std::move(failure);
      failed.store(true, std::memory_order_release);
    }
    if (options.abort_word) __atomic_store_n(reinterpret_cast<uint32_t*>(options.abort_word), 1u, __ATOMIC_RELEASE);
  }
  bool aborted() const {
    return failed.load(std::memory_order_acquire) ||
           (options.abort_word &&
            __atomic_load_n(reinterpret_cast<const uint32_t*>(options.abort_word), __ATOMIC_ACQUIRE) != 0);
  }
  bool failure(Failure* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed.load(std::memory_order_relaxed)) *out = failure_;
    return failed.load(std::memory_order_relaxed);
  }

  // The PE no longer takes part and may end at any time: see Proxy::excuse(). Any thread.
  void excuse(int pe) { excused_[(size_t)pe].store(true, std::memory_order_release); }
  bool excused(int pe) const { return excused_[(size_t)pe].load(std::memory_order_acquire); }

  // Why the owner has aborted, for threads without a failure of their own; see Proxy::explain().
  void explain(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  std::string reason() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed.load(std::memory_order_relaxed) ? failure_.text : reason_;
  }

  // One of the queues has done its part of a flush of all PEs.
  void flush_part_done(uint64_t ticket) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const uint32_t done = ++parts_done_[ticket];
      if (done < queues.size()) return;
      parts_done_.erase(ticket);
    }
    queues[ticket_queue(ticket)]->complete(ticket & kTicketPositionMask); // ticket_done() compares only these bits
  }

private:
  std::mutex mutex_;
  Failure failure_;
  std::string reason_;
  std::unordered_map<uint64_t, uint32_t> parts_done_;
  std::unique_ptr<std::atomic<bool>[]> excused_; // by PE
};

} // namespace tsn::proxy
