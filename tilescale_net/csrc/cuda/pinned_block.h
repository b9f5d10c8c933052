// Host memory that a device reaches.
#pragma once

#include <cstdint>

namespace tsn::cuda {

// Page-aligned zeroed host memory, pinned for the device when there is one.
class PinnedBlock {
public:
  PinnedBlock(uint64_t bytes, bool cuda);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t device() const { return device_; } // the device's address of data(); the same address without a device

private:
  char* data_;
  uint64_t bytes_;
  uint64_t device_;
  bool pinned_ = false;
};

} // namespace tsn::cuda
