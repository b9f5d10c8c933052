// Messages between proxies: sequences of records, each a multiple of 8 bytes long.
//
// Messages may arrive in any order, and before or after the data chunks that were posted first. Numbers of groups and
// marks are monotonic 64-bit counters whose low 32 bits travel; windows are far smaller, so the full numbers can be
// recovered (see ordering.h).
#pragma once

#include "tilescale_net/csrc/proxy/heap_memory.h"

namespace tsn::proxy {

enum class RecordType : uint8_t {
  mark = 1,    // MarkRecord: a signal, a flush, or the end of a group
  value = 2,   // ValueRecord and its payload: a few bytes of data, one chunk of its group
  ack = 3,     // AckRecord: progress of the stream's receiver
  credit = 4,  // CreditRecord: staging slots that are free again
  request = 5, // GetRecord: requests data, where reads are not possible
  abort = 6,   // AbortRecord and text: the sender gave up
};

enum class MarkOp : uint8_t {
  none = 0,   // only orders and counts
  set = 1,    // word at offset = value
  add = 2,    // word at offset += value
  answer = 3, // the get that `value` names has all its data
};

enum MarkFlags : uint8_t {
  kAfterAllMarks = 1, // apply only when every mark before `after_mark` is applied
  kReply = 2,         // acknowledge as soon as this mark and all before it are complete
};

struct MarkRecord {
  RecordType type;
  MarkOp op;
  uint8_t flags;
  uint8_t reserved;
  uint32_t sequence;      // of this mark
  uint32_t after_mark;    // the mark that must be applied first; itself if none. See kAfterAllMarks
  uint32_t groups_before; // all groups before this one must be complete
  uint32_t group;         // own group, if count is not 0
  uint32_t count;         // chunks of the own group
  uint32_t closed_group;  // a group of plain puts that ends here, if closed_count is not 0
  uint32_t closed_count;  // its chunks
  uint64_t offset;        // heap offset of the signal word
  uint64_t value;
};
static_assert(sizeof(MarkRecord) == 48, "MarkRecord layout");

struct ValueRecord {
  RecordType type;
  uint8_t reserved;
  uint16_t bytes; // of payload, which follows, padded to a multiple of 8
  uint32_t group;
  uint64_t offset; // heap offset to write it to
};
static_assert(sizeof(ValueRecord) == 16, "ValueRecord layout");

struct AckRecord {
  RecordType type;
  uint8_t reserved[3];
  uint32_t groups; // every group before this one is complete
  uint32_t marks;  // every mark before this one is applied, and visible to the device
  uint32_t chunks; // immediates taken from the completion queue: the source bounds their number
};
static_assert(sizeof(AckRecord) == 16, "AckRecord layout");

constexpr int kCreditsPerRecord = 6;
struct CreditRecord {
  RecordType type;
  uint8_t count;
  uint16_t reserved;
  uint16_t slots[kCreditsPerRecord];
};
static_assert(sizeof(CreditRecord) == 16, "CreditRecord layout");

struct GetRecord {
  RecordType type;
  uint8_t reserved[3];
  uint32_t id;     // returned in the answering mark
  uint64_t source; // heap offset at the receiver of this record
  uint64_t target; // heap offset at its sender
  uint64_t bytes;
};
static_assert(sizeof(GetRecord) == 32, "GetRecord layout");

struct AbortRecord {
  RecordType type;
  uint8_t reserved;
  uint16_t bytes; // of text, which follows, padded to a multiple of 8
  uint32_t reserved2;
};
static_assert(sizeof(AbortRecord) == 8, "AbortRecord layout");

// --- staging slots: a header; chunks, each behind its own header and padded to a multiple of 8 bytes; records ------
struct SlotHeader {
  uint32_t pieces;
  uint32_t bytes; // of the whole slot
};
struct PieceHeader {
  uint64_t offset; // heap offset at the target
  uint32_t bytes;
  uint32_t group; // kUncounted: test only
};
constexpr uint32_t kUncounted = ~0u;
static_assert(sizeof(SlotHeader) == 8 && sizeof(PieceHeader) == 16, "slots have one layout everywhere");

constexpr uint32_t padded(uint32_t bytes) { return (bytes + 7) & ~7u; }

// Reading a peer's messages. Nothing in them is trusted: every field is bounded here, before its use. Fields that
// depend on the state of a stream (windows, acknowledgements, credits) are checked with that state.
//
// Memory that peers may write and signal in a heap of `bytes` bytes. The system area is the package's own: of
// it, peers reach the flags of barriers, by signals.
struct HeapBounds {
  uint64_t bytes;
  bool data(uint64_t offset, uint64_t n) const {
    return offset >= kSystemBytes && offset <= bytes && n <= bytes - offset;
  }
  bool word(uint64_t offset) const { return offset % 8 == 0 && (flag(offset) || data(offset, 8)); }
  static bool flag(uint64_t offset) { return offset < 8ull * (kNodeBarrierFlags + kBarrierRounds); }
};

struct Record {
  RecordType type;
  uint32_t bytes;      // with payload and padding
  const char* payload; // of a value or an abort
  union {
    MarkRecord mark;
    ValueRecord value;
    AckRecord ack;
    CreditRecord credit;
    GetRecord request;
    AbortRecord abort;
  };
};

template <class T>
bool read_as(const char* data, uint64_t room, T* out, Record* record) {
  if (room < sizeof *out) return false;
  std::memcpy(out, data, sizeof *out);
  record->bytes = sizeof *out;
  record->payload = data + sizeof *out;
  return true;
}

// A payload of `bytes` bytes behind the record.
inline bool with_payload(uint64_t room, uint32_t bytes, Record* record) {
  if (room - record->bytes < padded(bytes)) return false;
  record->bytes += padded(bytes);
  return true;
}

inline bool sound(const MarkRecord& m, const HeapBounds& heap) {
  switch (m.op) {
  case MarkOp::none:
    return true;
  case MarkOp::set:
  case MarkOp::add:
    return heap.word(m.offset);
  case MarkOp::answer:
    return m.value <= UINT32_MAX;
  }
  return false;
}

// Reads the record at the start of `room` bytes. False: it is damaged.
inline bool read_record(const char* data, uint64_t room, const HeapBounds& heap, Record* out) {
  if (room < 8) return false;
  out->type = (RecordType)data[0];
  switch (out->type) {
  case RecordType::mark:
    return read_as(data, room, &out->mark, out) && sound(out->mark, heap);
  case RecordType::value:
    return read_as(data, room, &out->value, out) && out->value.bytes > 0 && out->value.bytes <= HeapMemory::kMaxWrite &&
           with_payload(room, out->value.bytes, out) && heap.data(out->value.offset, out->value.bytes);
  case RecordType::ack:
    return read_as(data, room, &out->ack, out);
  case RecordType::credit:
    return read_as(data, room, &out->credit, out) && out->credit.count > 0 && out->credit.count <= kCreditsPerRecord;
  case RecordType::request:
    return read_as(data, room, &out->request, out) && out->request.bytes > 0 &&
           heap.data(out->request.source, out->request.bytes) && heap.data(out->request.target, out->request.bytes);
  case RecordType::abort:
    return read_as(data, room, &out->abort, out) && with_payload(room, out->abort.bytes, out);
  }
  return false;
}

// The chunks of a staging slot, one after the other. The peer can write to the slot at any time, so the reader checks
// a copy.
class SlotReader {
public:
  // `slot`: memory of `slot_bytes` bytes.
  SlotReader(const char* slot, uint32_t slot_bytes, const HeapBounds& heap) : slot_(slot), heap_(heap) {
    SlotHeader header;
    if (slot_bytes < sizeof header) return;
    std::memcpy(&header, slot, sizeof header);
    end_ = header.bytes;
    left_ = header.pieces;
    good_ = end_ <= slot_bytes && end_ >= sizeof header + sizeof(PieceHeader) && left_ > 0;
  }
  // The next chunk, and the address of its data. False: no chunk is left; see good().
  bool next(PieceHeader* piece, const char** data) {
    if (!good_ || left_ == 0) return false;
    good_ = end_ - at_ >= sizeof *piece;
    if (!good_) return false;
    std::memcpy(piece, slot_ + at_, sizeof *piece);
    at_ += sizeof *piece;
    good_ = piece->bytes > 0 && piece->bytes <= end_ - at_ && heap_.data(piece->offset, piece->bytes);
    if (!good_) return false;
    *data = slot_ + at_;
    at_ += ((uint64_t)piece->bytes + 7) & ~7ull;
    good_ = at_ <= end_;
    left_--;
    return good_;
  }
  // Whether everything so far made sense, and after next() has answered false, the whole slot.
  bool good() const { return good_; }
  // The records behind the last chunk, as in a message.
  const char* records() const { return slot_ + at_; }
  uint64_t record_bytes() const { return end_ - at_; }

private:
  const char* slot_;
  HeapBounds heap_;
  uint64_t end_ = 0, at_ = sizeof(SlotHeader);
  uint32_t left_ = 0;
  bool good_ = false;
};

// Text of a peer for an error message: control characters become question marks.
inline std::string printable(const char* text, size_t bytes) {
  std::string clean(text, bytes);
  for (char& c : clean)
    if ((unsigned char)c < 0x20 || c == 0x7f) c = '?';
  return clean;
}

} // namespace tsn::proxy
