// The bare writer's way through pinned slots, for memory that the transport cannot reach: copied out of the source,
// written to the slot of the same number at the peer, copied in there, and given back with a message. The least that a
// proxy with staging (proxy/staging.h) can be compared with.
#pragma once

#include "tilescale_net/csrc/bench/network.h"
#include "tilescale_net/csrc/cuda/pinned_block.h"
#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/csrc/proxy/ring.h"

#include <memory>
#include <vector>

namespace tsn::bench {

class BareStaging {
public:
  // `cuda`: memory at `base` is on GPU `device`, else the host's. Throws FabricError, CudaError.
  BareStaging(Transport* transport, uint64_t base, bool cuda, int device, uint64_t chunk_bytes, uint32_t slots);

  Region receive_region() const { return receive_region_; }
  void set_peer(RemoteRegion slots) { remote_ = slots; }

  // Begins to copy a piece out; false while no slot is free.
  bool begin(uint64_t offset, uint64_t bytes);
  // Posts the pieces whose copies have ended, in order. `post` is called with the copy to post and does not fail.
  template <class PostWrite>
  void post_ready(int peer, uint64_t rails, PostWrite post);
  // Slots of pieces on their way, until they have been given back.
  uint64_t outstanding() const { return slots_ - free_.size(); }
  void given_back(uint32_t slot) { free_.push_back(slot); }

  // A piece has arrived in a slot: begins to copy it in.
  void arrived(uint32_t slot);
  // The next slot whose data are in place; false if no slot is.
  bool landed(uint32_t* slot);

private:
  struct Header {
    uint64_t offset, bytes;
  };
  struct Step {
    uint32_t slot;
    uint64_t bytes, position; // of the memory's copies
  };
  proxy::HeapMemory& memory();
  uint64_t place(uint32_t slot) const { return slot * slot_bytes_; }

  uint64_t base_;
  bool cuda_;
  int device_;
  uint64_t slots_, slot_bytes_;
  cuda::PinnedBlock send_, receive_;
  Region send_region_, receive_region_;
  RemoteRegion remote_ = -1;
  std::unique_ptr<proxy::HeapMemory> memory_; // made by the thread that uses it: CUDA contexts belong to threads
  std::vector<uint32_t> free_;
  proxy::Ring<Step> filling_, landing_;
};

template <class PostWrite>
void BareStaging::post_ready(int peer, uint64_t rails, PostWrite post) {
  memory().poll();
  while (!filling_.empty() && filling_.front().position <= memory().out_completed()) {
    const Step step = filling_.front();
    filling_.pop();
    Transport::Copy c = {};
    c.rail = (int)(step.slot % rails);
    c.peer = peer;
    c.local = send_region_;
    c.remote = remote_;
    c.local_offset = c.remote_offset = place(step.slot);
    c.bytes = step.bytes;
    c.has_imm = true;
    c.imm = step.slot;
    post(c);
  }
}

} // namespace tsn::bench
