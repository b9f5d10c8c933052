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
inline StagingShape staging_shape(const ProxyOptions& options, int peers, int slot_bits, uint64_t max_write,
                                  uint64_t immediates) {
  // Slots as large as a chunk may be, while every peer gets at least eight of them; not below 16 KiB.
  constexpr uint64_t kLeast = 8;
  StagingShape shape;
  uint64_t slot = std::max<uint64_t>(options.chunk_bytes, 4096);
  while (slot > 16384 && slot * kLeast * (uint64_t)std::max(peers, 1) > options.staging_bytes) slot /= 2;
  shape.slot_bytes =
      (uint32_t)std::min(((slot + 63) & ~63ull) + kSlotOverhead, max_write & ~63ull); // leaves in one write
  if (shape.slot_bytes < kLeastSlot)
    throw FabricError(concat("rank ", options.rank, ": the network writes at most ", max_write,
                             " bytes at a time; staging needs ", kLeastSlot));
  const uint64_t most = std::min<uint64_t>(most_slots(slot_bits), immediates);
  const uint64_t fit = options.staging_bytes / shape.slot_bytes;
  shape.slots_per_peer = (uint32_t)std::clamp<uint64_t>(fit / (uint64_t)std::max(peers, 1), 2, most);
  shape.send_slots = (uint32_t)std::clamp<uint64_t>(fit, 4, 4096);
  return shape;
}

class Staging {
public:
  // `peers`: PEs that write here. Chunks are cut to piece_bytes().
  Staging(const StagingShape& shape, int peers, bool cuda)
      : send((uint64_t)shape.send_slots * shape.slot_bytes, cuda),
        receive((uint64_t)shape.slots_per_peer * std::max(peers, 1) * shape.slot_bytes, cuda), shape_(shape) {
    for (uint32_t i = shape.send_slots; i > 0; i--) free_.push_back(i - 1);
  }

  cuda::PinnedBlock send, receive;
  uint32_t piece_bytes() const { return shape_.slot_bytes - kSlotOverhead; }
  const StagingShape& shape() const { return shape_; }

  // Source side. Starts to fill a slot from the front of the peer's operations; false if there is nothing to do, or
  // no free slot here or there.
  bool fill(PeerState* peer, HeapMemory* memory, bool trust_last_chunk) {
    if (peer->ops.empty() || free_.empty() || peer->credits.empty()) return false;
    SendSlot slot = {};
    slot.peer = peer;
    slot.begun = ticks();
    slot.index = free_.back();
    slot.remote = peer->credits.back();
    slot.interval = peer->ops.front().interval;
    free_.pop_back();
    peer->credits.pop_back();
    peer->has_credit[slot.remote] = 0;
    char* base = place(slot.index);
    uint32_t used = sizeof(SlotHeader), marks = 0; // `used`: without the marks
    // Small operations share a slot, as long as they belong to one interval and are there already.
    while (!peer->ops.empty()) {
      Op& op = peer->ops.front();
      const uint32_t bytes = (uint32_t)std::min<uint64_t>(op.bytes, op.chunk);
      const uint32_t need = (uint32_t)sizeof(PieceHeader) + padded(bytes);
      const uint32_t marked = op.marked && bytes == op.bytes;
      const uint32_t behind = (marks + marked) * (uint32_t)sizeof(MarkRecord);
      if (op.interval != slot.interval || used + need + behind > peer->slot_bytes) break;
      const bool counted = !trust_last_chunk || bytes == op.bytes;
      const PieceHeader header = {op.remote, bytes, counted ? op.group : kUncounted};
      std::memcpy(base + used, &header, sizeof header);
      memory->copy_out(base + used + sizeof header, op.local, bytes);
      used += need;
      marks += marked;
      slot.pieces++;
      op.local += bytes;
      op.remote += bytes;
      op.bytes -= bytes;
      if (op.bytes == 0) peer->ops.pop();
    }
    slot.bytes = used;
    slot.ready = memory->out_position();
    peer->own_pieces += slot.pieces;
    filling_.push(slot);
    for (; marks > 0; marks--, peer->marks.pop()) append(peer, peer->marks.front());
    return true;
  }
  // Puts a mark behind the data of the peer's latest slot. False: none that is still here has room.
  bool append(PeerState* peer, const MarkRecord& mark) {
    if (filling_.empty()) return false;
    SendSlot& slot = filling_.back();
    if (slot.peer != peer || slot.bytes + sizeof mark > peer->slot_bytes) return false;
    std::memcpy(place(slot.index) + slot.bytes, &mark, sizeof mark);
    slot.bytes += (uint32_t)sizeof mark;
    return true;
  }
  // The oldest slot whose data is complete, to be written to the peer; nullptr if no slot is.
  struct SendSlot {
    PeerState* peer;
    uint32_t index; // here
    uint16_t remote;
    uint32_t bytes, pieces, interval;
    uint64_t ready; // out_position of the heap
    uint64_t begun; // ticks(), for traces
  };
  SendSlot* ready(const HeapMemory& memory) {
    if (filling_.empty() || filling_.front().ready > memory.out_completed()) return nullptr;
    SendSlot* slot = &filling_.front();
    const SlotHeader header = {slot->pieces, slot->bytes};
    std::memcpy(place(slot->index), &header, sizeof header);
    return slot;
  }
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
