// Add mailboxes: how a proxy adds to signal words of a GPU heap.
//
// The proxy and, with atomics, the GPUs of this node may add to a word. The host has no atomic on GPU memory: the
// driver's stream memory operations only write, and a read-modify-write would lose the GPUs' adds. A kernel for the add
// might never run beside one that fills the GPU while it waits for the word. So the proxy leaves the add in a mailbox
// in the heap's system area, and the waiting kernel applies it: each poll of wait and test checks the mailboxes, and a
// call that uses the word's value first applies all adds. Only wait and test read signal words, so no reader sees a
// difference.
//
// Each proxy thread has its own mailbox: a circular buffer of (heap offset, value) entries, and the numbers of
// published, claimed and added entries. The proxy's copy stream writes the first, behind the entries and all data that
// the adds announce, the device the others. It reads an entry before it claims it: claimed entries may be overwritten.
#pragma once

#include "context.h"

namespace tsn {

constexpr int kMaxAddMailboxes = 8;
constexpr int kAddMailboxEntries = 256;
constexpr int kAddMailboxWords =
    kQueueWords + kMaxQueues * kQueueWordsStride; // first word of mailbox 0 in the system area
constexpr int kAddMailboxHeader = 32; // word 0: published, 16: claimed, 17: added; then the entries, two words each
constexpr int kAddMailboxClaimed = 16, kAddMailboxAdded = 17;
constexpr int kAddMailboxStride = kAddMailboxHeader + 2 * kAddMailboxEntries;
static_assert(kAddMailboxWords + kMaxAddMailboxes * kAddMailboxStride <= kGridBarrierWords,
              "the system area holds all mailboxes");

// Context::flags, bits 8..11: the number of mailboxes that waits check.
constexpr int kAddMailboxShift = 8;
constexpr uint32_t kAddMailboxMask = 15;

} // namespace tsn
