// Add boxes: how a proxy adds to signal words of a GPU heap.
//
// A word may be added to by the proxy and, with atomics, by the GPUs of this node. The host has no atomic on GPU memory
// (the driver's stream memory operations only write), a read-modify-write would lose the GPUs' adds, and a kernel might
// never run beside one that fills the GPU while it waits for that very word. So the proxy leaves the add in a box in
// the heap's system area, and the waiting kernel itself carries it out: each poll of wait and test looks at the boxes.
// A signal word is read with wait and test only, so nobody can tell the difference.
//
// Each proxy thread has a box of its own: a ring of (heap offset, value) entries, the number of entries published so
// far (written by the proxy's copy stream, behind the entries and behind all data that the adds announce), and the
// number claimed by the device. An entry is read before it is claimed, so what has been claimed may be overwritten.
#pragma once

#include "context.h"

namespace tsn {

constexpr int kMaxAddBoxes = 8;
constexpr int kAddBoxEntries = 256;
constexpr int kAddBoxWords = kQueueWords + kMaxQueues * kQueueWordsStride; // first word of box 0 in the system area
constexpr int kAddBoxHeader = 32; // word 0: published, word 16: claimed; then the entries, two words each
constexpr int kAddBoxClaimed = 16;
constexpr int kAddBoxStride = kAddBoxHeader + 2 * kAddBoxEntries;
static_assert(kAddBoxWords + kMaxAddBoxes * kAddBoxStride <= kGridBarrierWords, "the system area holds all boxes");

// Context::flags, bits 8..11: the number of boxes that waits look at.
constexpr int kAddBoxShift = 8;
constexpr uint32_t kAddBoxMask = 15;

} // namespace tsn
