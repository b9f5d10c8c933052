// The 32-byte descriptor that a kernel hands to the proxy: layout, encoding and decoding.
//
// Plain C++ without atomics, shared by device/queue.h (producer) and csrc/proxy/queue.h (consumer).
//
// A descriptor is two 16-byte halves. One 16-byte store writes each, and each carries its own parity bit,
// so the halves may arrive in any order and no slot is ever cleared: position p belongs to lap p / capacity, and a half
// is new when its bit equals parity_of(p).
//
//   half a, word 0:  bit 0 parity | 1..5 kind | 6..19 PE | 20..63 offset 1 (44 bits)
//           word 1:  value
//   half b, word 2:  bit 0 parity | 1..44 offset 2 | 45..63 size, high 19 bits
//           word 3:  bits 0..16 size, low 17 bits | 17..57 signal word (offset / 8, 41 bits)
//   half b of put_value_signal:
//           word 2:  bit 0 parity | 1..41 signal word
//           word 3:  value of the signal
//
// Kinds without a source and a signal need half a only; the consumer updates the parity of half b for them.
#pragma once

#include "context.h"
#include <stdint.h>

#ifdef __CUDACC__
#define TSN_DESCRIPTOR_FN __host__ __device__ inline
#else
#define TSN_DESCRIPTOR_FN inline
#endif

namespace tsn {

enum class Command : uint32_t {
  none = 0,           // never sent: all-zero memory is no descriptor
  put = 1,            // size bytes from local offset 2 to the PE's offset 1
  put_signal_set = 2, // put, then signal word = value
  put_signal_add = 3, // put, then signal word += value
  get = 4,            // size bytes from the PE's offset 2 to local offset 1, then done[]
  signal_set = 5,     // half a: word at offset 1 = value
  signal_add = 6,     // half a: word at offset 1 += value
  put_value_1 = 7,    // half a: the low 1, 2, 4, 8 bytes of data to offset 1
  put_value_2 = 8,
  put_value_4 = 9,
  put_value_8 = 10,
  fence = 11,      // half a: earlier puts to the PE before later signals to it
  flush = 12,      // half a: done[] is set when all earlier operations to the PE are complete there
  flush_part = 13, // half a: one queue's share of a flush of all PEs; value is the ticket that all shares complete
  put_value_signal_set_1 = 14, // put_value of 1, 2, 4, 8 bytes, then signal word = value
  put_value_signal_add_1 = 18, // the same, then signal word += value
};
constexpr uint32_t kCommandCount = 22;

constexpr int kOffsetBits = 44;
constexpr int kSizeBits = 36;
constexpr int kPeBits = 14;
constexpr int kSignalBits = 41;
constexpr int kCommandBits = 5;
constexpr uint64_t kMaxOffset = (1ull << kOffsetBits) - 1;
// Largest size of one descriptor; a multiple of 4 KiB, so that the parts of a longer put keep their alignment.
constexpr uint64_t kMaxDescriptorBytes = (1ull << kSizeBits) - 4096;
constexpr uint32_t kAllPes = (1u << kPeBits) - 1; // in the PE field: every PE of this queue
static_assert(kAllPes == kMaxPes, "all other values are PEs");
static_assert(1 + kCommandBits + kPeBits + kOffsetBits == 64, "word 0 is full");
static_assert(1 + kOffsetBits + 19 == 64 && 17 + 19 == kSizeBits, "word 2 is full and holds the high part of the size");
static_assert(17 + kSignalBits <= 64, "word 3");
static_assert(kSignalBits + 3 == kOffsetBits, "every 8-byte word of the heap can be a signal");
static_assert(kCommandCount <= 1u << kCommandBits, "kinds fit");

// Among a queue's words in the heap's system area: the head comes first, the cached tail in another cache line.
constexpr int kTailCacheWord = 16;

struct alignas(16) Descriptor {
  uint64_t word[4];
};
static_assert(sizeof(Descriptor) == 32, "a descriptor is 32 bytes");

// A descriptor taken apart.
struct Request {
  Command command = Command::none;
  uint32_t pe = 0;
  uint64_t first = 0;  // offset 1: destination, or the signal word of a bare signal
  uint64_t second = 0; // offset 2: source
  uint64_t bytes = 0;
  uint64_t signal = 0; // byte offset of the signal word that comes with data
  uint64_t value = 0;  // of a signal; of flush_part
  uint64_t data = 0;   // of put_value
};

TSN_DESCRIPTOR_FN bool is_value_signal(Command c) { return (uint32_t)c >= (uint32_t)Command::put_value_signal_set_1; }
TSN_DESCRIPTOR_FN bool is_value(Command c) {
  return is_value_signal(c) ||
         ((uint32_t)c >= (uint32_t)Command::put_value_1 && (uint32_t)c <= (uint32_t)Command::put_value_8);
}
TSN_DESCRIPTOR_FN bool has_second_half(Command c) {
  return ((uint32_t)c >= (uint32_t)Command::put && (uint32_t)c <= (uint32_t)Command::get) || is_value_signal(c);
}
// The kind for `bytes` bytes, one of 1, 2, 4, 8, in the family that starts with `one`; and back.
TSN_DESCRIPTOR_FN Command sized(Command one, int bytes) {
  return (Command)((uint32_t)one + (bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3));
}
TSN_DESCRIPTOR_FN uint32_t value_bytes(Command c) {
  return 1u << (is_value_signal(c) ? ((uint32_t)c - (uint32_t)Command::put_value_signal_set_1) % 4
                                   : (uint32_t)c - (uint32_t)Command::put_value_1);
}
TSN_DESCRIPTOR_FN bool adds(Command c) {
  return c == Command::put_signal_add || c == Command::signal_add ||
         (uint32_t)c >= (uint32_t)Command::put_value_signal_add_1;
}

// 1 in the first lap, so that zeroed slots are old. `mask` = capacity - 1, the capacity being a power of two.
TSN_DESCRIPTOR_FN uint64_t parity_of(uint64_t position, uint64_t mask) { return (position & (mask + 1)) == 0; }

// A signal word's number. A misaligned one becomes the last number, which lies outside every heap.
TSN_DESCRIPTOR_FN uint64_t signal_number(uint64_t offset) {
  return offset & 7 ? (uint64_t(1) << kSignalBits) - 1 : offset >> 3;
}

TSN_DESCRIPTOR_FN Descriptor encode(const Request& r, uint64_t parity) {
  Descriptor d;
  d.word[0] = parity | (uint64_t)r.command << 1 | (uint64_t)r.pe << (1 + kCommandBits) |
              r.first << (1 + kCommandBits + kPeBits);
  d.word[1] = is_value(r.command) ? r.data : r.value;
  if (is_value_signal(r.command)) {
    d.word[2] = parity | signal_number(r.signal) << 1;
    d.word[3] = r.value;
  } else {
    d.word[2] = parity | (r.second & kMaxOffset) << 1 | (r.bytes >> 17) << 45;
    d.word[3] = (r.bytes & 0x1ffff) | signal_number(r.signal) << 17;
  }
  return d;
}

TSN_DESCRIPTOR_FN Command command_of(uint64_t word0) { return (Command)(word0 >> 1 & ((1u << kCommandBits) - 1)); }

TSN_DESCRIPTOR_FN Request decode(const Descriptor& d) {
  Request r;
  r.command = command_of(d.word[0]);
  r.pe = (uint32_t)(d.word[0] >> (1 + kCommandBits)) & kAllPes;
  r.first = d.word[0] >> (1 + kCommandBits + kPeBits);
  (is_value(r.command) ? r.data : r.value) = d.word[1];
  if (!has_second_half(r.command)) return r;
  constexpr uint64_t kSignalMask = (1ull << kSignalBits) - 1;
  if (is_value_signal(r.command)) {
    r.signal = (d.word[2] >> 1 & kSignalMask) << 3;
    r.value = d.word[3];
    return r;
  }
  r.second = d.word[2] >> 1 & kMaxOffset;
  r.bytes = (d.word[2] >> 45) << 17 | (d.word[3] & 0x1ffff);
  r.signal = (d.word[3] >> 17 & kSignalMask) << 3;
  return r;
}

// --- tickets -------------------------------------------------------------------------------------------------------
// Ticket of a flush or get: the queue in the high 6 bits, the position modulo 2^58 below.
constexpr int kTicketPositionBits = 58;
constexpr uint64_t kTicketPositionMask = (1ull << kTicketPositionBits) - 1;

TSN_DESCRIPTOR_FN uint64_t make_ticket(uint32_t queue, uint64_t position) {
  return (uint64_t)queue << kTicketPositionBits | (position & kTicketPositionMask);
}
TSN_DESCRIPTOR_FN uint32_t ticket_queue(uint64_t ticket) { return (uint32_t)(ticket >> kTicketPositionBits); }

// Whether the ticket's operation is complete according to the board entry `done`; right across the wrap of positions.
TSN_DESCRIPTOR_FN bool ticket_done(uint64_t ticket, uint64_t done) {
  return (int64_t)((done - ticket - 1) << (64 - kTicketPositionBits)) >= 0;
}

} // namespace tsn
