#include "tilescale_net/csrc/bench/bare_staging.h"

#include <cstring>

namespace tsn::bench {

BareStaging::BareStaging(Transport* transport, uint64_t base, bool cuda, int device, uint64_t chunk_bytes,
                         uint32_t slots)
    : base_(base), cuda_(cuda), device_(device), slots_(slots), slot_bytes_(((chunk_bytes + 63) & ~63ull) + 64),
      send_(slots_ * slot_bytes_, cuda), receive_(slots_ * slot_bytes_, cuda) {
  send_region_ = transport->register_memory({send_.data(), send_.bytes(), Memory::host, 0});
  receive_region_ = transport->register_memory({receive_.data(), receive_.bytes(), Memory::host, 0});
  for (uint32_t i = slots; i > 0; i--) free_.push_back(i - 1);
  std::memset(send_.data(), 0, send_.bytes()); // page faults belong to no measured time
  std::memset(receive_.data(), 0, receive_.bytes());
}

proxy::HeapMemory& BareStaging::memory() {
  if (!memory_)
    memory_ =
        cuda_ ? proxy::make_cuda_memory(base_, device_, 0) : proxy::make_host_memory(reinterpret_cast<void*>(base_));
  return *memory_;
}

bool BareStaging::begin(uint64_t offset, uint64_t bytes) {
  if (free_.empty()) return false;
  const uint32_t slot = free_.back();
  free_.pop_back();
  char* to = send_.data() + place(slot);
  const Header header = {offset, bytes};
  std::memcpy(to, &header, sizeof header);
  memory().copy_out(to + sizeof header, offset, bytes);
  filling_.push({slot, sizeof header + bytes, memory().out_position()});
  return true;
}

void BareStaging::arrived(uint32_t slot) {
  const char* from = receive_.data() + place(slot);
  Header header;
  std::memcpy(&header, from, sizeof header);
  memory().copy_in(header.offset, from + sizeof header, header.bytes);
  landing_.push({slot, header.bytes, memory().in_position()});
}

bool BareStaging::landed(uint32_t* slot) {
  memory().poll();
  if (landing_.empty() || landing_.front().position > memory().in_completed()) return false;
  *slot = landing_.front().slot;
  landing_.pop();
  return true;
}

} // namespace tsn::bench
