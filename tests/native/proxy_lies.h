// A peer that lies in one field of an otherwise well-formed message, acknowledgement or staging slot.
#pragma once

#include "tests/native/proxy_world.h"
#include "tilescale_net/csrc/fabric/blob.h"

#include <cstring>

namespace tsn::proxy {

// The proxy address `real` of a PE, with 2^32 added to one number of its worker's: 0 the bits of immediates, 3 the
// bytes of a slot, 4 the slots, 5 the runs of PEs that it serves, 6 to 8 the first one, 9 the immediates that it takes.
// Or with another transport, and the key of that one's memory.
constexpr size_t kNumbers = 10;
inline std::string forged(const std::string& real, size_t lie, const std::string& transport = "",
                          const std::string& key = "") {
  fabric::BlobReader all(real, 0x74736e70, "the blob");
  fabric::BlobWriter out(0x74736e70), changed(0x74736e31);
  for (int i = 0; i < 6; i++) out.number(all.number());
  const std::string worker = all.text();
  fabric::BlobReader one(worker, 0x74736e31, "the worker's blob");
  auto numbers = [&, at = (size_t)0](size_t count) mutable {
    for (; count > 0; count--, at++) changed.number(one.number() + (at == lie ? 1ull << 32 : 0));
  };
  const std::string address = one.text();
  changed.text(transport.empty() ? address : transport);
  numbers(3);
  const std::string memory = one.text();
  changed.text(key.empty() ? memory : key);
  numbers(kNumbers - 3);
  out.text(changed.take());
  return out.take();
}

// Passes for PE 1 of a job of two; PE 0 is real.
class Liar {
public:
  explicit Liar(WorldOptions o) {
    o.make = transports_of(o);
    victim_ = std::make_unique<Pe>(0, o);
    model_ = std::make_unique<Pe>(1, o);
    TransportOptions t = o.proxy.transport;
    t.rank = 1;
    t.message_bytes = 4096;
    transport_ = o.make(t);
    mine_ = transport_->register_memory({model_->heap, o.heap_bytes, Memory::host, 0});
    const std::string proxy = victim_->proxy->address();
    fabric::BlobReader all(proxy, 0x74736e70, "the blob");
    for (int i = 0; i < 6; i++) all.number();
    const std::string worker = all.text();
    fabric::BlobReader one(worker, 0x74736e31, "the worker's address");
    transport_->connect(0, one.text());
    group_bits = (int)one.number();
    staged = one.number() != 0;
    one.number();
    theirs_ = transport_->add_remote(0, one.text());
    slot_bytes = (uint32_t)one.number();
    const std::string me =
        forged(model_->proxy->address(), kNumbers, transport_->address(), transport_->region_key(mine_));
    victim_->proxy->connect({proxy, me});
    victim_->proxy->start();
  }
  Pe& victim() { return *victim_; }

  template <class Record>
  void send(const Record& record, const std::string& payload = "") {
    std::string message(reinterpret_cast<const char*>(&record), sizeof record);
    message += payload;
    message.resize((message.size() + 7) & ~7ull);
    send_bytes(message);
  }
  void send_bytes(const std::string& message) {
    post([&] { return transport_->post_message(0, 0, message.data(), (uint32_t)message.size(), kSilent); });
  }
  // Writes to the victim's memory, and an immediate with it.
  void write_with(uint64_t at, const void* data, uint64_t bytes, uint32_t imm) {
    // Each write has bytes of its own, which leave later.
    char* source = model_->heap + used_;
    used_ = (used_ + 4096) % (1 << 20);
    std::memcpy(source, data, bytes);
    Transport::Copy c = {};
    c.local = mine_;
    c.local_offset = (uint64_t)(source - model_->heap);
    c.remote = theirs_;
    c.remote_offset = at;
    c.bytes = bytes;
    c.cookie = kSilent;
    c.has_imm = true;
    c.imm = imm;
    post([&] { return transport_->post_write(c); });
  }
  // The same with immediate `imm` of PE `pe`.
  void write(uint64_t at, const void* data, uint64_t bytes, uint32_t imm, uint32_t pe = 1) {
    write_with(at, data, bytes, pe << group_bits | imm);
  }
  void slot(const SlotHeader& header, const PieceHeader& piece, uint32_t imm = 0, const std::string& behind = "") {
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
    bytes.append(reinterpret_cast<const char*>(&piece), sizeof piece);
    bytes += behind;
    write((uint64_t)imm * slot_bytes, bytes.data(), bytes.size(), imm);
  }
  // Whether the victim has ended with an error, once what was sent may have reached it.
  bool exposed(Failure* f) {
    fabric::Event events[16];
    transport_->poll(events, 16);
    return victim_->proxy->failure(f);
  }
  // The error that the victim ends with, or "" after a while.
  std::string verdict(uint64_t patience_ns = 10000000000ull) {
    Failure f;
    const uint64_t end = now_ns() + patience_ns;
    while (!exposed(&f) && now_ns() < end) sched_yield();
    return f.kind + ": " + f.text;
  }
  void stop() { victim_->proxy->stop(); }

  int group_bits = 0;
  bool staged = false;
  uint32_t slot_bytes = 0;

private:
  template <class Post>
  void post(Post try_once) {
    Failure f;
    for (;;) {
      const fabric::Post answer = try_once();
      CHECK(answer != fabric::Post::error, "%s", transport_->last_error());
      if (answer == fabric::Post::ok || exposed(&f)) return;
    }
  }

  std::unique_ptr<Pe> victim_, model_; // model_: a PE whose proxy never starts, for its address and memory
  std::unique_ptr<Transport> transport_;
  uint64_t used_ = 0;
  Region mine_;
  RemoteRegion theirs_;
};

inline MarkRecord lying_mark(MarkOp op, uint64_t offset, uint64_t value = 1) {
  MarkRecord m = {};
  m.type = RecordType::mark;
  m.op = op;
  m.offset = offset;
  m.value = value;
  return m;
}

// Numbers that would be right if they were cut to 32 bits are refused before the PE is believed to be connected.
inline void lying_addresses(WorldOptions o) {
  if (!o.proxy.force_staging) return;
  for (size_t lie : {0, 3, 4, 5, 6, 7, 8, 9}) {
    WorldOptions of_job = o;
    of_job.make = transports_of(o);
    Pe a(0, of_job), b(1, of_job);
    std::string said;
    try {
      a.proxy->connect({a.proxy->address(), forged(b.proxy->address(), lie)});
    } catch (const fabric::FabricError& error) {
      said = error.what();
    }
    CHECK(said.find("rank 1") != std::string::npos, "number %zu of a lying address: \"%s\"", lie, said.c_str());
  }
}

struct Lie {
  const char* what;
  std::function<void(Liar&)> tell;
  int staged; // -1: in both modes
};

// What a peer may send that breaks the protocol, to a PE with a heap of so many bytes.
inline std::vector<Lie> all_lies(uint64_t heap) {
  auto ack = [](uint32_t groups, uint32_t marks, uint32_t chunks) {
    return AckRecord{RecordType::ack, {}, groups, marks, chunks};
  };
  return {
      {"signal to a queue's head", [](Liar& l) { l.send(lying_mark(MarkOp::set, 1024)); }, -1},
      {"signal to an add mailbox", [](Liar& l) { l.send(lying_mark(MarkOp::add, 8ull * kAddMailboxWords)); }, -1},
      {"misaligned signal", [](Liar& l) { l.send(lying_mark(MarkOp::set, kSystemBytes + 4)); }, -1},
      {"signal beyond the heap", [=](Liar& l) { l.send(lying_mark(MarkOp::set, heap)); }, -1},
      {"value into the system area",
       [](Liar& l) { l.send(ValueRecord{RecordType::value, 0, 8, 0, 512}, std::string(8, 'x')); }, -1},
      {"value around the end",
       [=](Liar& l) { l.send(ValueRecord{RecordType::value, 0, 8, 0, heap - 4}, std::string(8, 'x')); }, -1},
      {"value at the end of numbers",
       [](Liar& l) { l.send(ValueRecord{RecordType::value, 0, 8, 0, ~0ull - 3}, std::string(8, 'x')); }, -1},
      {"acknowledged groups", [=](Liar& l) { l.send(ack(1000, 0, 0)); }, -1},
      {"acknowledged marks", [=](Liar& l) { l.send(ack(0, 7, 0)); }, -1},
      {"acknowledged immediates", [=](Liar& l) { l.send(ack(0, 0, 9)); }, -1},
      {"an answer to nothing", [](Liar& l) { l.send(lying_mark(MarkOp::answer, 0, 0)); }, -1},
      {"an answer to a get by RDMA",
       [](Liar& l) {
         queue_get(l.victim().context, l.victim().at(kSystemBytes), l.victim().at(kSystemBytes), 1 << 20, 1);
         std::this_thread::sleep_for(std::chrono::milliseconds(5));
         l.send(lying_mark(MarkOp::answer, 0, 0));
       },
       0},
      {"two answers",
       [](Liar& l) {
         queue_get(l.victim().context, l.victim().at(kSystemBytes), l.victim().at(kSystemBytes), 1 << 20, 1);
         std::this_thread::sleep_for(std::chrono::milliseconds(5));
         MarkRecord m = lying_mark(MarkOp::answer, 0, 0);
         m.count = 2;
         l.send(m);
         m.sequence = m.after_mark = 1;
         m.group = 1;
         l.send(m);
       },
       1},
      {"a request for the system area",
       [](Liar& l) { l.send(GetRecord{RecordType::request, {}, 0, 0, kSystemBytes, 64}); }, 1},
      {"a request into the system area",
       [](Liar& l) { l.send(GetRecord{RecordType::request, {}, 0, kSystemBytes, 1024, 64}); }, 1},
      {"credit for a slot that is free", [](Liar& l) { l.send(CreditRecord{RecordType::credit, 1, 0, {0}}); }, 1},
      {"credit for no slot", [](Liar& l) { l.send(CreditRecord{RecordType::credit, 1, 0, {60000}}); }, 1},
      {"credit without staging", [](Liar& l) { l.send(CreditRecord{RecordType::credit, 1, 0, {0}}); }, 0},
      {"a slot shorter than its headers", [](Liar& l) { l.slot({1, 4}, {kSystemBytes, 60 << 20, 0}); }, 1},
      {"a slot of headers alone", [](Liar& l) { l.slot({1, 24}, {kSystemBytes, 60 << 20, 0}); }, 1},
      {"a piece longer than its slot", [](Liar& l) { l.slot({1, 64}, {kSystemBytes, 4096, 0}); }, 1},
      {"a piece into the system area", [](Liar& l) { l.slot({1, 64}, {1024, 16, 0}); }, 1},
      {"a piece beyond the heap", [=](Liar& l) { l.slot({1, 64}, {heap - 8, 16, 0}); }, 1},
      {"more pieces than there are", [](Liar& l) { l.slot({1 << 30, 40}, {kSystemBytes, 8, 0}); }, 1},
      {"a slot with half of a mark",
       [](Liar& l) { l.slot({1, 56}, {kSystemBytes, 8, 0}, 0, std::string(8, 'x') + '\1' + std::string(23, '\0')); },
       1},
      {"a slot with a signal to a queue's head",
       [](Liar& l) {
         const MarkRecord m = lying_mark(MarkOp::set, 1024);
         l.slot({1, 80}, {kSystemBytes, 8, 0}, 0,
                std::string(8, 'x') + std::string(reinterpret_cast<const char*>(&m), sizeof m));
       },
       1},
      {"a slot that does not exist", [](Liar& l) { l.write(0, "12345678", 8, (1u << l.group_bits) - 1); }, 1},
      {"a value of its record's type only", [](Liar& l) { l.send(AbortRecord{RecordType::abort, 0, 60000, 0}); }, -1},
  };
}

inline void lies(WorldOptions o) {
  lying_addresses(o);
  o.heap_bytes = 64 << 20;
  for (const Lie& lie : all_lies(o.heap_bytes)) {
    if (lie.staged >= 0 && lie.staged != (int)o.proxy.force_staging) continue;
    Liar liar(o);
    CHECK(liar.staged == o.proxy.force_staging);
    std::memset(liar.victim().heap + kSystemBytes, 0x5a, o.heap_bytes - kSystemBytes);
    std::memset(liar.victim().at(kSystemBytes), 0, 1 << 20);
    lie.tell(liar);
    const std::string verdict = liar.verdict();
    CHECK(verdict.find("FabricError: rank 0: PE 1 broke the protocol") == 0, "%s: %s", lie.what, verdict.c_str());
    for (uint64_t i = 8ull * kQueueWords + 16; i < 8ull * (kQueueWords + 16); i++)
      CHECK(liar.victim().heap[i] == 0, "%s: the system area changed at %d", lie.what, (int)i);
    for (uint64_t i = kSystemBytes + (1 << 20); i < o.heap_bytes; i += 97)
      CHECK(liar.victim().heap[i] == 0x5a, "%s: the heap changed at %d", lie.what, (int)i);
    liar.stop();
  }
  // The text of an abort may be any bytes; and an unknown PE is ignored.
  Liar liar(o);
  liar.write(liar.staged ? 0 : kSystemBytes, "12345678", 8, 0, 0); // PE 0 is the victim itself
  liar.send(AbortRecord{RecordType::abort, 0, 6, 0}, "\x1b[2Jno");
  const std::string verdict = liar.verdict();
  CHECK(verdict.find("gave up, for this reason: ?[2Jno") != std::string::npos, "%s", verdict.c_str());
  CHECK(liar.victim().proxy->stats().at("rejected_messages") == 1);
  liar.stop();
}

} // namespace tsn::proxy
