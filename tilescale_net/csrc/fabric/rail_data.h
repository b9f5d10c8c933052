// The data path of a rail: posting and polling. Inline, so that a transport's calls and its rails' are compiled in one
// piece: at ten million operations a second a call is one percent.
#pragma once

#include "rail.h"

#define TSN_HOT [[gnu::always_inline]] inline

namespace tsn::fabric {

TSN_HOT bool Rail::take(FreeSlots& free, uint32_t& slot, Kind kind, int peer, uint64_t cookie) {
  if (__builtin_expect(free.empty(), 0)) return false;
  slot = free.take();
  slots_[slot] = Slot{cookie, peer, kind};
  return true;
}

TSN_HOT void Rail::give(uint32_t slot) {
  slots_[slot].kind = kFree;
  (slot < depth_ ? free_ : free_receives_).give(slot);
}

TSN_HOT Post Rail::post_result(ssize_t rc, uint32_t slot, const char* operation) {
  return __builtin_expect(rc == 0, 1) ? Post::ok : on_post_failed(rc, slot, operation);
}

TSN_HOT Post Rail::write(const Target& to, const void* source, void* desc, const Transport::Copy& copy) {
  // A doorbell may only wait when the post that will ring it has a slot.
  if (copy.more && free_.given - free_.taken > 1) return write_more(to, source, desc, copy);
  uint32_t slot;
  if (!take(free_, slot, kCopy, to.peer, copy.cookie)) return Post::again;
  const ssize_t rc =
      copy.has_imm
          ? fi_writedata(ep_.get(), source, copy.bytes, desc, copy.imm, to.address, to.remote, to.key, context(slot))
          : fi_write(ep_.get(), source, copy.bytes, desc, to.address, to.remote, to.key, context(slot));
  return post_result(rc, slot, "a write");
}

TSN_HOT Post Rail::read(const Target& from, void* destination, void* desc, const Transport::Copy& copy) {
  if (copy.more && free_.given - free_.taken > 1) return read_more(from, destination, desc, copy);
  uint32_t slot;
  if (!take(free_, slot, kCopy, from.peer, copy.cookie)) return Post::again;
  return post_result(
      fi_read(ep_.get(), destination, copy.bytes, desc, from.address, from.remote, from.key, context(slot)), slot,
      "a read");
}

// Turns completions into events; returns the number of those for the caller. What the loop changes is kept in
// registers, because the compiler must assume that an event could lie anywhere.
TSN_HOT int Rail::completions(const fi_cq_data_entry* entries, int count, Event* events) {
  Slot* const slots = slots_.data();
  uint32_t* const ring = free_.ring.get();
  const uint32_t depth = depth_, mask = free_.mask;
  const int32_t rail = index_;
  uint32_t given = free_.given;
  Event* out = events;
  for (const fi_cq_data_entry* entry = entries; entry != entries + count; ++entry) {
    const uint32_t slot = slot_of(entry->op_context);
    if (__builtin_expect(slot >= depth || (entry->flags & FI_REMOTE_CQ_DATA) || slots[slot].kind == kFree, 0)) {
      free_.given = given;
      out += other_completion(*entry, *out);
      given = free_.given;
      continue;
    }
    const uint64_t cookie = slots[slot].cookie;
    out->kind = Event::done;
    out->peer = slots[slot].peer;
    out->rail = rail;
    out->cookie = cookie;
    slots[slot].kind = kFree;
    ring[given++ & mask] = slot;
    out += cookie != kSilent;
  }
  free_.given = given;
  return static_cast<int>(out - events);
}

TSN_HOT void Rail::new_poll() {
  if (__builtin_expect(needs_repost_, 0)) repost_buffers();
}

TSN_HOT int Rail::poll(Event* events, int capacity) {
  int n = __builtin_expect(ready_.empty(), 1) ? 0 : take_ready(events, capacity);
  while (n < capacity) {
    fi_cq_data_entry entries[kBatch];
    const int room = capacity - n < kBatch ? capacity - n : kBatch;
    const ssize_t got = fi_cq_read(cq_.get(), entries, room);
    if (got <= 0) {
      if (__builtin_expect(got == -FI_EAGAIN || got == 0, 1)) break;
      if (!on_cq_error(got, events[n])) break;
      ++n;
      if (got != -FI_EAVAIL) break;
      continue;
    }
    n += completions(entries, static_cast<int>(got), events + n);
    if (got < room) break;
  }
  return n;
}

} // namespace tsn::fabric
