#include "tilescale_net/csrc/proxy/staging.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace tsn::proxy {

StagingShape staging_shape(const ProxyOptions& options, int peers, int slot_bits, uint64_t max_write,
                           uint64_t immediates) {
  // Slots as large as a chunk may be, while every peer gets at least eight of them; not below 16 KiB.
  constexpr uint64_t kLeast = 8;
  StagingShape shape;
  uint64_t slot = std::max<uint64_t>(options.chunk_bytes, 4096);
  while (slot > 16384 && slot * kLeast * (uint64_t)std::max(peers, 1) > options.staging_bytes) slot /= 2;
  shape.slot_bytes =
      (uint32_t)std::min(((slot + 63) & ~63ull) + kSlotOverhead, max_write & ~63ull); // leaves in one write
  if (shape.slot_bytes < kLeastSlot)
    throw FabricError("rank " + std::to_string(options.rank) + ": the network writes at most " +
                      std::to_string(max_write) + " bytes at a time; staging needs " + std::to_string(kLeastSlot));
  const uint64_t most = std::min<uint64_t>(most_slots(slot_bits), immediates);
  const uint64_t fit = options.staging_bytes / shape.slot_bytes;
  shape.slots_per_peer = (uint32_t)std::clamp<uint64_t>(fit / (uint64_t)std::max(peers, 1), 2, most);
  shape.send_slots = (uint32_t)std::clamp<uint64_t>(fit, 4, 4096);
  return shape;
}

Staging::Staging(const StagingShape& shape, int peers, bool cuda)
    : send((uint64_t)shape.send_slots * shape.slot_bytes, cuda),
      receive((uint64_t)shape.slots_per_peer * std::max(peers, 1) * shape.slot_bytes, cuda), shape_(shape) {
  for (uint32_t i = shape.send_slots; i > 0; i--) free_.push_back(i - 1);
}

bool Staging::fill(PeerState* peer, HeapMemory* memory, bool trust_last_chunk) {
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

bool Staging::append(PeerState* peer, const MarkRecord& mark) {
  if (filling_.empty()) return false;
  SendSlot& slot = filling_.back();
  if (slot.peer != peer || slot.bytes + sizeof mark > peer->slot_bytes) return false;
  std::memcpy(place(slot.index) + slot.bytes, &mark, sizeof mark);
  slot.bytes += (uint32_t)sizeof mark;
  return true;
}

Staging::SendSlot* Staging::ready(const HeapMemory& memory) {
  if (filling_.empty() || filling_.front().ready > memory.out_completed()) return nullptr;
  SendSlot* slot = &filling_.front();
  const SlotHeader header = {slot->pieces, slot->bytes};
  std::memcpy(place(slot->index), &header, sizeof header);
  return slot;
}

} // namespace tsn::proxy
