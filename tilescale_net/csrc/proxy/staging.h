// Pinned slots on both sides, for heaps that the transport cannot reach.
//
// The source packs one or more chunks into a send slot, a header before each, and behind them the marks of the signals
// whose data end there: a put_signal is one write. It writes the slot into one of the slots that the target keeps for
// this source; the immediate names source and slot. The target copies the chunks into its heap, counts them in their
// groups, takes the marks, and returns the slot with a credit. Copies on both sides run on the device's copy engines
// beside the network: each waits only for its own data and a free slot.
#pragma once

#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/csrc/proxy/peer_state.h"

#include <algorithm>

namespace tsn::proxy {

constexpr uint32_t kSlotOverhead = 128; // headers of a slot with one chunk, padding, and a mark
constexpr uint32_t kLeastSlot = 192;
static_assert(sizeof(SlotHeader) + sizeof(PieceHeader) + 7 + sizeof(MarkRecord) <= kSlotOverhead);

// Of this thread; a peer's may differ, because it may serve another number of peers.
struct StagingShape {
  uint32_t slot_bytes = 0;
  uint32_t send_slots = 0;     // per thread
  uint32_t slots_per_peer = 0; // at the target, for each source
};
// Slots per peer that an immediate with `slot_bits` free bits can name.
inline uint32_t most_slots(int slot_bits) { return std::min(1u << std::min(slot_bits, 15), 1024u); }
// `immediates`: how many a peer may have in flight. Throws FabricError when a slot would not fit a single write of the
// network.
StagingShape staging_shape(const ProxyOptions& options, int peers, int slot_bits, uint64_t max_write,
                           uint64_t immediates);

class Staging {
public:
  // `peers`: PEs that write here. Chunks are cut to piece_bytes().
  Staging(const StagingShape& shape, int peers, bool cuda);

  cuda::PinnedBlock send, receive;
  uint32_t piece_bytes() const { return shape_.slot_bytes - kSlotOverhead; }
  const StagingShape& shape() const { return shape_; }

  // Source side. Starts to fill a slot from the front of the peer's operations; false if there is nothing to do, or
  // no free slot here or there.
  bool fill(PeerState* peer, HeapMemory* memory, bool trust_last_chunk);
  // Puts a mark behind the data of the peer's latest slot. False: none that is still here has room.
  bool append(PeerState* peer, const MarkRecord& mark);
  // The oldest slot whose data is complete, to be written to the peer; nullptr if no slot is.
  struct SendSlot {
    PeerState* peer;
    uint32_t index; // here
    uint16_t remote;
    uint32_t bytes, pieces, interval;
    uint64_t ready; // out_position of the heap
    uint64_t begun; // ticks(), for traces
  };
  SendSlot* ready(const HeapMemory& memory);
  void pop_ready() { filling_.pop(); }
  void release(uint32_t send_slot) { free_.push_back(send_slot); }
  bool busy() { return !filling_.empty(); }

  // Target side: address of slot `slot` of the peer with index `peer`.
  char* slot(int peer, uint32_t slot) const {
    return receive.data() + ((uint64_t)peer * shape_.slots_per_peer + slot) * shape_.slot_bytes;
  }

private:
  char* place(uint32_t send_slot) const { return send.data() + (uint64_t)send_slot * shape_.slot_bytes; }

  StagingShape shape_;
  std::vector<uint32_t> free_;
  Ring<SendSlot> filling_;
};

} // namespace tsn::proxy
