// Fuzzers for everything that a proxy reads from a peer: libFuzzer calls in with arbitrary bytes, of which the first
// chooses what they pass for. Under AddressSanitizer and UndefinedBehaviorSanitizer; everything accepted is checked to
// be inside its bounds.
//
// usage: [FUZZ_TARGET=records|slot|immediates|blob] fuzz_peer [libFuzzer's options]
#include "tests/native/check.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include "tilescale_net/csrc/proxy/ordering.h"
#include "tilescale_net/csrc/proxy/wire.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

using namespace tsn;
using namespace tsn::proxy;

namespace {

constexpr uint64_t kHeap = 1 << 20;
constexpr uint32_t kSlot = 4096;
const HeapBounds bounds = {kHeap};

void inside(uint64_t offset, uint64_t bytes) {
  CHECK(offset >= kSystemBytes && offset < kHeap && bytes > 0 && bytes <= kHeap - offset);
}

// Bytes of exactly the length that they have: reading one more is an error that AddressSanitizer sees.
std::unique_ptr<char[]> exact(const uint8_t* data, size_t bytes) {
  std::unique_ptr<char[]> copy(new char[bytes]);
  if (bytes) std::memcpy(copy.get(), data, bytes);
  return copy;
}

// A message: records one after the other, marks and acknowledgements taken by a stream's ordering.
void records(const uint8_t* data, size_t size) {
  const auto message = exact(data, size);
  OrderTarget target({8, 8});
  std::optional<OrderSource> source; // made when it is needed: it is large
  for (uint64_t at = 0; at < size;) {
    Record r;
    if (!read_record(message.get() + at, size - at, bounds, &r)) return;
    CHECK(r.bytes >= 8 && r.bytes % 8 == 0 && r.bytes <= size - at);
    bool good = true;
    switch (r.type) {
    case RecordType::mark:
      if (r.mark.op == MarkOp::set || r.mark.op == MarkOp::add)
        CHECK(r.mark.offset % 8 == 0 && r.mark.offset <= kHeap - 8 &&
              (r.mark.offset >= kSystemBytes || r.mark.offset < 512));
      good = target.mark(r.mark);
      break;
    case RecordType::value: {
      inside(r.value.offset, r.value.bytes);
      char sink[HeapMemory::kMaxWrite];
      std::memcpy(sink, r.payload, r.value.bytes);
      good = target.chunk(r.value.group);
      break;
    }
    case RecordType::ack:
      if (!source) {
        source.emplace(OrderWindow{8, 8});
        for (int i = 0; i < 3; i++) source->signal(MarkOp::set, kSystemBytes, 1, source->own(2), 2);
      }
      good = source->acknowledge(r.ack);
      CHECK(source->settled_marks() <= source->next_mark());
      break;
    case RecordType::credit:
      CHECK(r.credit.count >= 1 && r.credit.count <= kCreditsPerRecord);
      break;
    case RecordType::request:
      inside(r.request.source, r.request.bytes);
      inside(r.request.target, r.request.bytes);
      break;
    case RecordType::abort:
      for (char c : printable(r.payload, r.abort.bytes)) CHECK((unsigned char)c >= 0x20 && c != 0x7f);
      break;
    }
    MarkRecord applied;
    while (target.next(&applied)) CHECK((uint8_t)applied.op <= (uint8_t)MarkOp::answer);
    if (!good) return;
    at += r.bytes;
  }
}

void slot(const uint8_t* data, size_t size) {
  static const std::unique_ptr<char[]> memory(new char[kSlot]);
  size = std::min<size_t>(size, kSlot);
  std::memcpy(memory.get(), data, size);
  std::memset(memory.get() + size, 0, kSlot - size);
  SlotReader pieces(memory.get(), kSlot, bounds);
  PieceHeader piece;
  const char* from;
  uint64_t sum = 0, pieces_seen = 0;
  while (pieces.next(&piece, &from)) {
    inside(piece.offset, piece.bytes);
    CHECK(from > memory.get() && from + piece.bytes <= memory.get() + kSlot);
    for (uint32_t i = 0; i < piece.bytes; i++) sum += (unsigned char)from[i];
    CHECK(++pieces_seen <= kSlot / sizeof(PieceHeader));
  }
  if (pieces.good()) CHECK(pieces.records() + pieces.record_bytes() <= memory.get() + kSlot);
  volatile uint64_t keep = sum;
  (void)keep;
}

// Immediates and marks of a peer, in any order: four bytes each.
void immediates(const uint8_t* data, size_t size) {
  OrderTarget target({4u << (size % 3), 4u << (size / 3 % 3)});
  for (size_t at = 0; at + 4 <= size; at += 4) {
    bool good;
    if (data[at] & 1) {
      MarkRecord m = {};
      m.type = RecordType::mark;
      m.op = (MarkOp)(data[at] >> 1 & 3);
      m.flags = data[at] >> 3 & 3;
      m.sequence = data[at + 1];
      m.after_mark = m.sequence - (data[at + 2] & 3);
      m.groups_before = data[at + 2] >> 2;
      m.group = data[at + 3] & 15;
      m.count = data[at + 3] >> 4 & 3;
      m.closed_group = data[at + 3] >> 6;
      m.closed_count = data[at] >> 5;
      good = target.mark(m);
    } else {
      uint32_t imm;
      std::memcpy(&imm, data + at, 4);
      good = target.chunk(imm >> 1);
    }
    MarkRecord applied;
    while (target.next(&applied)) CHECK((uint8_t)applied.op <= (uint8_t)MarkOp::answer);
    if (!good) return;
  }
}

// Addresses and keys, field by field as all of them are read.
void blob(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    fabric::BlobReader reader(bytes, 0x74736e31, "the fuzzer's blob");
    for (size_t i = 0; i < 64; i++) {
      if (i % 3 == 0) CHECK(reader.text().size() <= size);
      else reader.number();
    }
  } catch (const fabric::FabricError&) {
  }
}

struct Target {
  const char* name;
  void (*read)(const uint8_t*, size_t);
};
const Target targets[] = {{"records", records}, {"slot", slot}, {"immediates", immediates}, {"blob", blob}};

// The target that all inputs are for, or null: then their first byte chooses.
const Target* only() {
  const char* name = std::getenv("FUZZ_TARGET");
  if (!name) return nullptr;
  for (const Target& t : targets)
    if (!std::strcmp(t.name, name)) return &t;
  CHECK(false, "FUZZ_TARGET=%s is none of records, slot, immediates, blob", name);
  return nullptr;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Target* const chosen = only();
  if (size == 0) return 0;
  (chosen ? *chosen : targets[data[0] % 4]).read(data + 1, size - 1);
  return 0;
}

// Half of the inputs are made by changing a field of something well formed.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  if (seed % 4 || most < 256) return LLVMFuzzerMutate(data, size, most);
  auto field = [&](unsigned shift) -> uint64_t {
    static const uint64_t values[] = {
        0, 1, 2, 7, 8, 24, 40, 511, 512, 1024, kSystemBytes, kSystemBytes + 8, kHeap - 8, kHeap, ~0ull, 1ull << 63};
    return values[(seed >> shift) % 16];
  };
  size_t at = 1;
  auto put = [&](const auto& record) {
    std::memcpy(data + at, &record, sizeof record);
    at += sizeof record;
  };
  data[0] = seed / 4 % 8 < 6 ? 0 : (uint8_t)(seed / 4 % 8 - 5);
  switch (seed / 4 % 8) {
  case 0: {
    MarkRecord m = {};
    m.type = RecordType::mark;
    m.op = (MarkOp)(seed >> 9 & 3);
    m.count = (uint32_t)field(12) & 3;
    m.sequence = m.after_mark = (uint32_t)field(16) & 7;
    m.offset = field(20);
    put(m);
    break;
  }
  case 1:
    put(ValueRecord{RecordType::value, 0, (uint16_t)field(8), (uint32_t)field(12), field(16)});
    at += 64;
    break;
  case 2:
    put(AckRecord{RecordType::ack, {}, (uint32_t)field(8), (uint32_t)field(12), (uint32_t)field(16)});
    break;
  case 3:
    put(CreditRecord{RecordType::credit, (uint8_t)field(8), 0, {(uint16_t)field(12)}});
    break;
  case 4:
    put(GetRecord{RecordType::request, {}, 0, field(8), field(12), field(16)});
    break;
  case 5:
    put(AbortRecord{RecordType::abort, 0, (uint16_t)field(8), 0});
    at += 32;
    break;
  case 6:
    put(SlotHeader{(uint32_t)field(8), (uint32_t)field(12)});
    put(PieceHeader{field(16), (uint32_t)field(20), 0});
    break;
  default:
    for (; at + 8 < 200; at += 8) put((uint64_t)(seed >> (at / 8 % 24)));
  }
  return at;
}
