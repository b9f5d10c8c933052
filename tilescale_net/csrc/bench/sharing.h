// The cost of sharing endpoints between threads: each endpoint with a control block (domain, address vector, completion
// queue) of its own, used by all threads (FI_THREAD_SAFE) or by one (FI_THREAD_DOMAIN).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilescale_net/csrc/bench/network.h"
#include "tilescale_net/csrc/fabric/provider.h"

namespace tsn::bench {

struct SharingOptions {
  int threads = 1;
  int window = 32;    // operations that a thread has outstanding
  uint64_t bytes = 8; // of one operation
  bool write = false; // reads otherwise
  bool shared = true; // any thread uses any endpoint; otherwise thread t uses endpoints t, t + threads, …
  double duration_s = 1;
  double timeout_s = 30;
};

struct SharingResult {
  std::vector<double> operations_per_s; // by thread
  std::vector<double> cycles_per_post;  // by thread: time stamp counter ticks within the posting call
};

class ControlBlock; // an endpoint and what belongs to it

// The initiator's endpoint i talks to the target's endpoint i. Both sides construct one, exchange addresses,
// connect(); then, as often as they like, the initiator calls run() and end_round() while the target calls serve().
class SharingBench {
public:
  static constexpr uint64_t kBufferBytes = 8 << 20;

  SharingBench(const TransportOptions& options, int endpoints, bool thread_safe);
  ~SharingBench();

  std::string address() const;
  void connect(const std::string& address);
  const std::string& provider() const { return provider_; }
  int endpoints() const { return static_cast<int>(blocks_.size()); }

  // The initiator: measures. Throws FabricError naming the thread and endpoint of a failed operation, or of one that
  // does not complete.
  SharingResult run(const SharingOptions& options);
  // The initiator: notifies the target that round number `round` (1, 2, …) is over.
  void end_round(uint64_t round, double timeout_s);
  // The target: drives progress until the initiator has ended that round.
  void serve(uint64_t round, double timeout_s);

private:
  class Worker;
  volatile uint64_t* word(uint64_t offset) { return reinterpret_cast<volatile uint64_t*>(buffer_ + offset); }

  const Library& library_;
  fabric::Selection selection_; // as long as the endpoints
  std::string provider_;
  std::vector<std::unique_ptr<ControlBlock>> blocks_;
  char* buffer_ = nullptr;
};

} // namespace tsn::bench
