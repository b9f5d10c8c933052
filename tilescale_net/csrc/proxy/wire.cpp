#include "tilescale_net/csrc/proxy/wire.h"

#include <cstring>

namespace tsn::proxy {
namespace {

template <class T>
bool read(const char* data, uint64_t room, T* out, Record* record) {
  if (room < sizeof *out) return false;
  std::memcpy(out, data, sizeof *out);
  record->bytes = sizeof *out;
  record->payload = data + sizeof *out;
  return true;
}

// A payload of `bytes` bytes behind the record.
bool with_payload(uint64_t room, uint32_t bytes, Record* record) {
  if (room - record->bytes < padded(bytes)) return false;
  record->bytes += padded(bytes);
  return true;
}

bool sound(const MarkRecord& m, const HeapBounds& heap) {
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

} // namespace

bool read_record(const char* data, uint64_t room, const HeapBounds& heap, Record* out) {
  if (room < 8) return false;
  out->type = (RecordType)data[0];
  switch (out->type) {
  case RecordType::mark:
    return read(data, room, &out->mark, out) && sound(out->mark, heap);
  case RecordType::value:
    return read(data, room, &out->value, out) && out->value.bytes > 0 && out->value.bytes <= HeapMemory::kMaxWrite &&
           with_payload(room, out->value.bytes, out) && heap.data(out->value.offset, out->value.bytes);
  case RecordType::ack:
    return read(data, room, &out->ack, out);
  case RecordType::credit:
    return read(data, room, &out->credit, out) && out->credit.count > 0 && out->credit.count <= kCreditsPerRecord;
  case RecordType::request:
    return read(data, room, &out->request, out) && out->request.bytes > 0 &&
           heap.data(out->request.source, out->request.bytes) && heap.data(out->request.target, out->request.bytes);
  case RecordType::abort:
    return read(data, room, &out->abort, out) && with_payload(room, out->abort.bytes, out);
  }
  return false;
}

SlotReader::SlotReader(const char* slot, uint32_t slot_bytes, const HeapBounds& heap) : slot_(slot), heap_(heap) {
  SlotHeader header;
  if (slot_bytes < sizeof header) return;
  std::memcpy(&header, slot, sizeof header);
  end_ = header.bytes;
  left_ = header.pieces;
  good_ = end_ <= slot_bytes && end_ >= sizeof header + sizeof(PieceHeader) && left_ > 0;
}

bool SlotReader::next(PieceHeader* piece, const char** data) {
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

std::string printable(const char* text, size_t bytes) {
  std::string clean(text, bytes);
  for (char& c : clean)
    if ((unsigned char)c < 0x20 || c == 0x7f) c = '?';
  return clean;
}

} // namespace tsn::proxy
