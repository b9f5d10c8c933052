// Reading what a peer sent. Nothing in it is trusted: every field is bounded here, before it is used.
//
// What depends on the state of a stream (windows, acknowledgements, credits) is checked where that state is.
#pragma once

#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/csrc/proxy/wire.h"

#include <string>

namespace tsn::proxy {

// Where peers may write and what they may signal in a heap of `bytes` bytes. The system area is the package's own: of
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

// Reads the record at the start of `room` bytes. False: it makes no sense.
bool read_record(const char* data, uint64_t room, const HeapBounds& heap, Record* out);

// The chunks of a staging slot, one after the other. The peer can write to the slot at any time: what has been checked
// is a copy.
class SlotReader {
public:
  // `slot`: memory of `slot_bytes` bytes.
  SlotReader(const char* slot, uint32_t slot_bytes, const HeapBounds& heap);
  // The next chunk, and where its data lie. False: no chunk is left; see good().
  bool next(PieceHeader* piece, const char** data);
  // Whether everything so far made sense, and after next() has answered false, the whole slot.
  bool good() const { return good_; }

private:
  const char* slot_;
  HeapBounds heap_;
  uint64_t end_ = 0, at_ = sizeof(SlotHeader);
  uint32_t left_ = 0;
  bool good_ = false;
};

// Text of a peer for an error message: control characters become question marks.
std::string printable(const char* text, size_t bytes);

} // namespace tsn::proxy
