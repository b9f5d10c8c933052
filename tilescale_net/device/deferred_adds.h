// The device's half of add boxes, see add_box.h.
#pragma once

#include "add_box.h"
#include "platform.h"

namespace tsn {
namespace detail {

TSN_COLD void empty_add_box(const Context* ctx, uint64_t* box) {
  const uint64_t base = platform::load_constant(&ctx->heap_base);
  for (;;) {
    const uint64_t claimed = platform::load<Order::relaxed, MemScope::gpu>(box + kAddBoxClaimed);
    if (platform::load<Order::relaxed, MemScope::sys>(box) == claimed) return;
    platform::fence<MemScope::sys>(); // the entry, and what it announces, come after the count
    const uint64_t* entry = box + kAddBoxHeader + 2 * (claimed % kAddBoxEntries);
    const uint64_t offset = platform::load<Order::relaxed, MemScope::sys>(entry);
    const uint64_t value = platform::load<Order::relaxed, MemScope::sys>(entry + 1);
    // acq_rel: the entry is read before anyone can see it as claimed.
    if (platform::atomic_cas<Order::acq_rel, MemScope::sys>(box + kAddBoxClaimed, claimed, claimed + 1) != claimed)
      continue;
    platform::add_release(reinterpret_cast<uint64_t*>(base + offset), value);
  }
}

} // namespace detail

// The number of boxes; 0 where every PE is mapped.
TSN_DEVICE uint32_t add_boxes(const Context* ctx) {
  return platform::load_constant(&ctx->flags) >> kAddBoxShift & kAddBoxMask;
}

// Carries out the adds that the proxy has left; called by every poll of a signal word, unless there are no boxes.
TSN_COLD void apply_deferred_adds(const Context* ctx, uint32_t boxes) {
  uint64_t* box = reinterpret_cast<uint64_t*>(platform::load_constant(&ctx->heap_base)) + kAddBoxWords;
  for (uint32_t i = 0; i < boxes; i++, box += kAddBoxStride) {
    const uint64_t claimed = platform::load<Order::relaxed, MemScope::gpu>(box + kAddBoxClaimed);
    if (platform::load<Order::relaxed, MemScope::sys>(box) != claimed) detail::empty_add_box(ctx, box);
  }
}

} // namespace tsn
