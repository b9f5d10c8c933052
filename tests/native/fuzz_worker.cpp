// A fuzzer of a whole proxy: a false peer sends messages, immediates, credits, acknowledgements and staging slots over
// the loopback transport, or a proxy connects to an address that a stranger has changed. Under AddressSanitizer
// and UndefinedBehaviorSanitizer; the proxy goes on, or ends with an error that can be printed.
//
// usage: fuzz_worker [libFuzzer's options]
#include "tests/native/proxy_lies.h"

using namespace tsn;
using namespace tsn::proxy;

namespace {

// Reads an input from its beginning; zeros after its end.
struct Input {
  const uint8_t* data;
  size_t left;
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes && left; i++, left--) value |= (uint64_t)*data++ << (8 * i);
    return value;
  }
  // Mostly one that means something somewhere.
  uint64_t field(uint64_t heap) {
    const uint64_t values[] = {
        0, 1, 2, 7, 8, 24, 40, 511, 512, 4096, kSystemBytes - 8, kSystemBytes, kSystemBytes + 8, heap - 8, heap, ~0ull};
    const uint8_t kind = (uint8_t)number(1);
    return kind < 16 ? values[kind] : kind < 32 ? number(8) : kind < 64 ? number(4) : number(1);
  }
  std::string text(size_t most) {
    std::string found;
    for (size_t bytes = number(1) % (most + 1); bytes > 0; bytes--) found += (char)number(1);
    return found;
  }
};

void tell(Liar& liar, Input& in, uint64_t heap) {
  switch (in.number(1) % 8) {
  case 0: { // anything
    const std::string text = in.text(255);
    if (!text.empty()) liar.send(text[0], text.substr(1));
    break;
  }
  case 1: {
    MarkRecord m = lying_mark((MarkOp)in.number(1), in.field(heap), in.field(heap));
    m.flags = (uint8_t)in.number(1);
    m.sequence = (uint32_t)in.field(heap);
    m.after_mark = (uint32_t)in.field(heap);
    m.groups_before = (uint32_t)in.field(heap);
    m.group = (uint32_t)in.field(heap);
    m.count = (uint32_t)in.field(heap);
    m.closed_group = (uint32_t)in.field(heap);
    m.closed_count = (uint32_t)in.field(heap);
    liar.send(m);
    break;
  }
  case 2:
    liar.send(
        AckRecord{RecordType::ack, {}, (uint32_t)in.field(heap), (uint32_t)in.field(heap), (uint32_t)in.field(heap)});
    break;
  case 3:
    liar.send(CreditRecord{RecordType::credit, (uint8_t)in.number(1), 0, {(uint16_t)in.field(heap)}}, in.text(64));
    break;
  case 4:
    liar.send(
        GetRecord{RecordType::request, {}, (uint32_t)in.field(heap), in.field(heap), in.field(heap), in.field(heap)});
    break;
  case 5:
    liar.send(AbortRecord{RecordType::abort, 0, (uint16_t)in.field(heap), 0}, in.text(64));
    break;
  case 6: // a slot, or any other write where slots are, with any immediate
    liar.slot({(uint32_t)in.field(heap), (uint32_t)in.field(heap)}, {in.field(heap), (uint32_t)in.field(heap), 0},
              (uint32_t)in.number(1) % 4, in.text(128));
    break;
  default: {
    const uint64_t word = in.number(8);
    liar.write(0, &word, sizeof word, (uint32_t)in.number(4) & 0xffff, (uint32_t)in.number(1) % 4);
  }
  }
}

void converse(Input& in, bool staged) {
  WorldOptions o;
  o.heap_bytes = 1 << 20;
  o.proxy.force_staging = staged;
  o.proxy.timeout = 5;
  auto hub = std::make_shared<fabric::LoopbackHub>();
  o.make = [hub](const TransportOptions& t) { return std::make_unique<fabric::Loopback>(hub, t); };
  Liar liar(o);
  auto heard = [&] { // whether the victim has taken what was sent
    fabric::LoopbackHub::Endpoint& victim = hub->at(0);
    std::lock_guard<std::mutex> lock(victim.mutex);
    return victim.inbox.empty();
  };
  if (in.number(1) & 1) { // something of its own is in flight
    Pe& pe = liar.victim();
    queue_put(pe.context, pe.at(kSystemBytes), pe.at(kSystemBytes), 5000, 1);
  }
  while (in.left) tell(liar, in, o.heap_bytes);
  const uint64_t end = now_ns() + 2000000000ull;
  Failure f;
  while (!heard() && !liar.victim().proxy->failure(&f) && now_ns() < end) sched_yield();
  CHECK(heard() || liar.victim().proxy->failure(&f), "the proxy stands still");
  if (liar.victim().proxy->failure(&f))
    for (char c : f.text) CHECK((unsigned char)c >= 0x20 && c != 0x7f, "an error that steers a terminal");
  liar.stop();
}

// The address of a proxy with some of its bytes changed, cut off, or made longer.
void connect(Input& in, bool staged) {
  WorldOptions o;
  o.heap_bytes = 1 << 20;
  o.proxy.force_staging = staged;
  auto hub = std::make_shared<fabric::LoopbackHub>();
  o.make = [hub](const TransportOptions& t) { return std::make_unique<fabric::Loopback>(hub, t); };
  Pe a(0, o), b(1, o);
  std::string address = b.proxy->address();
  if (in.number(1) % 4 == 0) address = forged(address, in.number(1) % kNumbers);
  for (int changes = (int)(in.number(1) % 8); changes > 0 && !address.empty(); changes--) {
    const size_t at = in.number(2) % address.size();
    if (in.number(1) % 4) address[at] = (char)in.number(1);
    else if (in.number(1) % 2) address.resize(at);
    else address.insert(at, in.text(16));
  }
  try {
    a.proxy->connect({a.proxy->address(), address});
  } catch (const fabric::FabricError& error) {
    CHECK(*error.what());
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in = {data, size};
  const uint64_t kind = in.number(1);
  if (kind % 4 == 0) connect(in, kind & 4);
  else converse(in, kind & 4);
  return 0;
}
