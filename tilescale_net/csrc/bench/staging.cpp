#include "staging.h"

namespace tsn::bench {

Staging::Staging(char* host, uint64_t device_address, uint64_t bytes, int device)
    : context_(device), host_(host), device_(device_address) {
  cuda::check(cuda::driver().cuMemHostRegister(host, bytes, cuda::kHostRegisterPortable), "pinning the staging buffer");
  for (Slot& slot : slots_)
    cuda::check(cuda::driver().cuStreamCreate(&slot.stream, cuda::kStreamNonBlocking), "creating a stream");
}

Staging::~Staging() {
  for (Slot& slot : slots_)
    if (slot.stream) {
      cuda::driver().cuStreamSynchronize(slot.stream);
      cuda::driver().cuStreamDestroy(slot.stream);
    }
  cuda::driver().cuMemHostUnregister(host_);
}

bool Staging::begin(bool to_host, uint64_t offset, uint64_t bytes, uint64_t tag) {
  for (Slot& slot : slots_) {
    if (slot.busy) continue;
    if (to_host)
      cuda::check(cuda::driver().cuMemcpyDtoHAsync(host_ + offset, device_ + offset, bytes, slot.stream),
                  "copying to the host");
    else
      cuda::check(cuda::driver().cuMemcpyHtoDAsync(device_ + offset, host_ + offset, bytes, slot.stream),
                  "copying to the device");
    slot.busy = true;
    slot.what = {to_host, tag};
    return true;
  }
  return false;
}

void Staging::poll(std::vector<Done>& done) {
  constexpr cuda::Result kNotReady = 600; // CUDA_ERROR_NOT_READY
  done.clear();
  for (Slot& slot : slots_) {
    if (!slot.busy) continue;
    const cuda::Result state = cuda::driver().cuStreamQuery(slot.stream);
    if (state == kNotReady) continue;
    cuda::check(state, "a staging copy");
    slot.busy = false;
    done.push_back(slot.what);
  }
}

void Staging::copy(bool to_host, uint64_t offset, uint64_t bytes) {
  std::vector<Done> done;
  while (!begin(to_host, offset, bytes, 0)) poll(done);
  for (Slot& slot : slots_) cuda::check(cuda::driver().cuStreamSynchronize(slot.stream), "a staging copy");
  poll(done);
}

} // namespace tsn::bench
