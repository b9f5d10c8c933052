// OrderSource against OrderTarget over a network that delivers in any order.
//
// The test keeps its own record of what precedes what, in plain sets, and checks each application of a mark against it.
// usage: proxy_ordering_test <seeds> <operations>
#include "tests/native/check.h"
#include "tilescale_net/csrc/proxy/ordering.h"

#include <map>
#include <random>
#include <set>

using namespace tsn;
using namespace tsn::proxy;

namespace {

struct Packet {
  bool is_mark;
  uint32_t group; // modulo the window, as in an immediate
  uint64_t put;   // which operation the chunk belongs to
  MarkRecord mark;
};

struct Expected {
  std::set<uint64_t> puts; // must be complete before the mark is applied
  uint64_t word = 0;
  bool flush = false;
};

struct Model {
  std::map<uint64_t, uint32_t> missing; // chunks of put i that have not arrived
  std::map<uint64_t, Expected> marks;   // by sequence
  std::map<uint64_t, uint64_t> last_on_word;
  uint64_t applied = 0;
};

void run(uint32_t seed, int operations) {
  std::mt19937 random(seed);
  auto pick = [&](uint32_t n) { return random() % n; };
  OrderWindow window;
  window.groups = 4u << pick(5);
  window.marks = 4u << pick(5);
  OrderSource source(window);
  OrderTarget target(window);
  Model model;
  std::vector<Packet> network;
  std::vector<AckRecord> acks;
  std::set<uint64_t> open, before_fence; // puts since / before the latest fence
  uint64_t puts = 0, marks = 0;
  uint64_t acked_groups = 0, acked_marks = 0;
  const uint32_t words = 1 + pick(6);

  auto send_chunks = [&](uint64_t group, uint32_t chunks) {
    model.missing[puts] = chunks;
    for (uint32_t i = 0; i < chunks; i++) network.push_back({false, (uint32_t)(group % window.groups), puts, {}});
    return puts++;
  };
  auto send_mark = [&](const MarkRecord& mark, Expected expected) {
    CHECK(mark.sequence == (uint32_t)marks, "marks are numbered in order");
    model.marks[marks++] = std::move(expected);
    network.push_back({true, 0, 0, mark});
  };
  auto apply_ready = [&] {
    MarkRecord mark;
    while (target.next(&mark)) {
      auto it = model.marks.find(mark.sequence);
      CHECK(it != model.marks.end(), "mark %u applied twice", mark.sequence);
      for (uint64_t put : it->second.puts) CHECK(!model.missing.count(put), "seed %u: mark before put", seed);
      if (it->second.flush) CHECK(it == model.marks.begin(), "seed %u: a flush overtook a mark", seed);
      if (mark.op == MarkOp::set) {
        uint64_t& last = model.last_on_word[it->second.word];
        CHECK(mark.value > last, "seed %u: word %d went from %d to %d", seed, (int)it->second.word, (int)last,
              (int)mark.value);
        last = mark.value;
      }
      model.marks.erase(it);
      model.applied++;
    }
    CHECK(target.applied_marks() <= marks, "more applied than sent");
  };
  auto deliver = [&] {
    if (!network.empty() && (acks.empty() || pick(4))) {
      const size_t i = pick((uint32_t)network.size());
      const Packet packet = network[i];
      network[i] = network.back();
      network.pop_back();
      if (packet.is_mark) {
        CHECK(target.mark(packet.mark), "seed %u: mark refused", seed);
      } else {
        if (!--model.missing[packet.put]) model.missing.erase(packet.put);
        CHECK(target.chunk(packet.group), "seed %u: chunk refused", seed);
      }
      apply_ready();
      if (target.complete_groups() - acked_groups >= window.groups / 4 ||
          target.applied_marks() - acked_marks >= window.marks / 4 || !pick(8)) {
        acked_groups = target.complete_groups();
        acked_marks = target.applied_marks();
        acks.push_back({RecordType::ack, {}, (uint32_t)acked_groups, (uint32_t)acked_marks, 0});
      }
      return true;
    }
    if (acks.empty()) return false;
    const size_t i = pick((uint32_t)acks.size());
    CHECK(source.acknowledge(acks[i]), "seed %u: acknowledgement refused", seed);
    acks.erase(acks.begin() + (long)i);
    return true;
  };

  for (int n = 0; n < operations; n++) {
    while (!source.room()) CHECK(deliver(), "seed %u: stuck with full windows", seed);
    if (source.stale()) send_mark(source.close(), {});
    while (!source.room()) CHECK(deliver(), "seed %u: stuck with full windows", seed);
    const uint32_t chunks = 1 + pick(5);
    switch (pick(8)) {
    case 0:
    case 1:
    case 2:
      open.insert(send_chunks(source.plain(chunks), chunks));
      break;
    case 3:
      source.fence();
      before_fence.insert(open.begin(), open.end());
      open.clear();
      break;
    case 4: {
      const uint64_t group = source.own(chunks);
      Expected e;
      e.puts = before_fence;
      const uint64_t put = send_chunks(group, chunks);
      e.puts.insert(put);
      e.word = pick(words);
      send_mark(source.signal(MarkOp::set, e.word * 8, (uint64_t)n + 1, group, chunks), e);
      open.insert(put);
      break;
    }
    case 5: {
      Expected e;
      e.puts = before_fence;
      e.word = pick(words);
      send_mark(source.signal(MarkOp::set, e.word * 8, (uint64_t)n + 1, 0, 0), e);
      break;
    }
    case 6: {
      if (pick(4)) break;
      Expected e;
      for (uint64_t i = 0; i < puts; i++)
        if (model.missing.count(i)) e.puts.insert(i);
      e.flush = true;
      send_mark(source.flush(), e);
      break;
    }
    default:
      for (uint32_t i = pick(20); i; i--) deliver();
    }
    // Puts that have arrived need no further look.
    for (auto* set : {&open, &before_fence})
      for (auto it = set->begin(); it != set->end();) it = model.missing.count(*it) ? std::next(it) : set->erase(it);
  }
  while (!source.room()) CHECK(deliver(), "seed %u: stuck at the end", seed);
  send_mark(source.flush(), {});
  while (deliver()) {
  }
  CHECK(model.marks.empty() && model.missing.empty(), "seed %u: something never arrived", seed);
  CHECK(model.applied == marks, "seed %u: %d of %d marks applied", seed, (int)model.applied, (int)marks);
  AckRecord last = {RecordType::ack, {}, (uint32_t)target.complete_groups(), (uint32_t)target.applied_marks(), 0};
  source.acknowledge(last);
  CHECK(!source.unsettled(), "seed %u: unsettled after everything was acknowledged", seed);
}

// What no correct peer sends is refused, and does not corrupt the counters.
void refusals() {
  OrderTarget target({8, 8});
  MarkRecord m = {};
  m.type = RecordType::mark;
  m.sequence = m.after_mark = 8; // outside the window
  CHECK(!target.mark(m));
  m.sequence = m.after_mark = 0;
  m.group = 9; // outside the window
  m.count = 1;
  CHECK(!target.mark(m));
  m.group = 1;
  m.count = 2;
  CHECK(target.mark(m));
  CHECK(!target.mark(m), "the same mark twice");
  CHECK(target.chunk(1));
  MarkRecord out;
  CHECK(!target.next(&out), "applied before its chunks");
  CHECK(target.chunk(1));
  CHECK(!target.chunk(1), "one chunk too many");
  CHECK(target.next(&out) && !target.next(&out));
}

} // namespace

int main(int argc, char** argv) {
  const int seeds = argc > 1 ? std::atoi(argv[1]) : 200;
  const int operations = argc > 2 ? std::atoi(argv[2]) : 2000;
  for (int seed = 0; seed < seeds; seed++) run((uint32_t)seed, operations);
  refusals();
  std::puts("ok");
  return 0;
}
