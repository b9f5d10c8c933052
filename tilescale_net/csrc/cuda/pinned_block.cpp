#include "tilescale_net/csrc/cuda/pinned_block.h"

#include "tilescale_net/csrc/cuda/driver.h"

#include <new>
#include <sys/mman.h>

namespace tsn::cuda {

PinnedBlock::PinnedBlock(uint64_t bytes, bool cuda) : bytes_((bytes + 4095) & ~4095ull) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(p);
  device_ = reinterpret_cast<uint64_t>(p);
  if (!cuda) return;
  try {
    const Driver& d = driver();
    check(d.cuMemHostRegister(data_, bytes_, kHostRegisterPortable | kHostRegisterDeviceMap), "cuMemHostRegister");
    pinned_ = true;
    Pointer address;
    check(d.cuMemHostGetDevicePointer(&address, data_, 0), "cuMemHostGetDevicePointer");
    device_ = address;
  } catch (...) {
    if (pinned_) driver().cuMemHostUnregister(data_);
    munmap(data_, bytes_);
    throw;
  }
}

PinnedBlock::~PinnedBlock() {
  if (pinned_) driver().cuMemHostUnregister(data_);
  munmap(data_, bytes_);
}

} // namespace tsn::cuda
