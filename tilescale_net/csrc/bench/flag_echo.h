// A CPU thread that answers a flag with a flag: the least that any exchange of a device with the host costs.
#pragma once

#include "tilescale_net/csrc/cuda/pinned_block.h"

#include <atomic>
#include <thread>

namespace tsn::bench {

// Two words in the kind of memory that queues live in, each in a page of its own. What the device stores to `ping`
// appears in `pong`.
class FlagEcho {
public:
  // `cpu`: where the thread runs; -1: anywhere. Throws std::invalid_argument when it may not run there.
  FlagEcho(bool cuda, int cpu);
  ~FlagEcho();
  uint64_t ping() const { return memory_.device(); }
  uint64_t pong() const { return memory_.device() + kPage; }

private:
  static constexpr uint64_t kPage = 4096;
  void run();

  cuda::PinnedBlock memory_;
  const bool shares_core_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

} // namespace tsn::bench
