// The device's half of add mailboxes, see add_mailbox.h.
#pragma once

#include "add_mailbox.h"
#include "spin.h"

namespace tsn {
namespace detail {

TSN_COLD void drain_add_mailbox(const Context* ctx, uint64_t* mailbox) {
  const uint64_t base = platform::load_constant(&ctx->heap_base);
  for (;;) {
    const uint64_t claimed = platform::load<Order::relaxed, MemScope::gpu>(mailbox + kAddMailboxClaimed);
    if (platform::load<Order::relaxed, MemScope::sys>(mailbox) == claimed) return;
    platform::fence<MemScope::sys>(); // reads of the entry, and of its data, come after the count
    const uint64_t* entry = mailbox + kAddMailboxHeader + 2 * (claimed % kAddMailboxEntries);
    const uint64_t offset = platform::load<Order::relaxed, MemScope::sys>(entry);
    const uint64_t value = platform::load<Order::relaxed, MemScope::sys>(entry + 1);
    // acq_rel: the entry is read before anyone can see it as claimed.
    if (platform::atomic_cas<Order::acq_rel, MemScope::sys>(mailbox + kAddMailboxClaimed, claimed, claimed + 1) !=
        claimed)
      continue;
    platform::add_release(reinterpret_cast<uint64_t*>(base + offset), value);
    platform::add_release(mailbox + kAddMailboxAdded, uint64_t(1));
  }
}

} // namespace detail

// The number of mailboxes; 0 if every PE is mapped.
TSN_DEVICE uint32_t n_add_mailboxes(const Context* ctx) {
  return platform::load_constant(&ctx->flags) >> kAddMailboxShift & kAddMailboxMask;
}

// Applies the proxy's adds; called by every poll of a signal word, unless there are no mailboxes.
TSN_COLD void drain_add_mailboxes(const Context* ctx, uint32_t mailboxes) {
  uint64_t* mailbox = reinterpret_cast<uint64_t*>(platform::load_constant(&ctx->heap_base)) + kAddMailboxWords;
  for (uint32_t i = 0; i < mailboxes; i++, mailbox += kAddMailboxStride) {
    const uint64_t claimed = platform::load<Order::relaxed, MemScope::gpu>(mailbox + kAddMailboxClaimed);
    if (platform::load<Order::relaxed, MemScope::sys>(mailbox) != claimed) detail::drain_add_mailbox(ctx, mailbox);
  }
}

// The same, and returns when adds that other threads have claimed are applied as well: every add from before the call
// is in its word.
TSN_COLD void settle_add_mailboxes(const Context* ctx, uint32_t mailboxes) {
  drain_add_mailboxes(ctx, mailboxes);
  uint64_t* mailbox = reinterpret_cast<uint64_t*>(platform::load_constant(&ctx->heap_base)) + kAddMailboxWords;
  for (uint32_t i = 0; i < mailboxes; i++, mailbox += kAddMailboxStride)
    spin(
        ctx,
        [&] {
          const uint64_t added = platform::load<Order::acquire, MemScope::sys>(mailbox + kAddMailboxAdded);
          return platform::load<Order::relaxed, MemScope::gpu>(mailbox + kAddMailboxClaimed) == added;
        },
        [] {});
}

} // namespace tsn
