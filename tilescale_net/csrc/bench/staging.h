// Copies between GPU memory and pinned host memory, several at once, for providers that cannot reach GPU memory.
#pragma once

#include <cstdint>
#include <vector>

#include "tilescale_net/csrc/cuda/driver.h"

namespace tsn::bench {

class Staging {
public:
  // `host` and `device_address` are two images of one buffer of `bytes` bytes. Pins the host memory. Throws CudaError.
  Staging(char* host, uint64_t device_address, uint64_t bytes, int device);
  ~Staging();
  Staging(const Staging&) = delete;

  // Begins to copy [offset, offset + bytes) to the host or to the device; false when too many copies are under way.
  bool begin(bool to_host, uint64_t offset, uint64_t bytes, uint64_t tag);

  struct Done {
    bool to_host;
    uint64_t tag;
  };
  // Fills `done` with the copies that have ended since the last call.
  void poll(std::vector<Done>& done);

  // Copies and waits.
  void copy(bool to_host, uint64_t offset, uint64_t bytes);

private:
  static constexpr int kStreams = 4;
  struct Slot {
    cuda::Stream stream = nullptr;
    bool busy = false;
    Done what = {};
  };

  cuda::PrimaryContext context_;
  char* host_;
  uint64_t device_;
  Slot slots_[kStreams];
};

} // namespace tsn::bench
