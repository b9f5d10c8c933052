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
  uint64_t marks = 0;      // so many marks must have been applied
  uint64_t word = 0;
  bool flush = false;
};

// One run of random operations, delivered in a random order.
class Run {
public:
  explicit Run(uint32_t seed) : seed_(seed), random_(seed) {}

  void go(int operations) {
    for (int n = 0; n < operations; n++) {
      make_room();
      if (source_.stale()) send_mark(source_.close(), {});
      make_room();
      operate((uint64_t)n + 1);
      // Puts that have arrived need no further look.
      for (auto* set : {&open_, &before_fence_})
        for (auto it = set->begin(); it != set->end();) it = missing_.count(*it) ? std::next(it) : set->erase(it);
    }
    make_room();
    send_mark(source_.flush(), {});
    while (deliver()) {
    }
    CHECK(marks_.empty() && missing_.empty(), "seed %u: something never arrived", seed_);
    CHECK(applied_ == sent_marks_, "seed %u: %d of %d marks applied", seed_, (int)applied_, (int)sent_marks_);
    AckRecord last = {RecordType::ack, {}, (uint32_t)target_.complete_groups(), (uint32_t)target_.applied_marks(), 0};
    source_.acknowledge(last);
    CHECK(!source_.unsettled(), "seed %u: unsettled after everything was acknowledged", seed_);
  }

private:
  uint32_t pick(uint32_t n) { return random_() % n; }

  OrderWindow random_window() {
    OrderWindow window;
    window.groups = 4u << pick(5);
    window.marks = 4u << pick(5);
    return window;
  }

  void make_room() {
    while (!source_.room()) CHECK(deliver(), "seed %u: stuck with full windows", seed_);
  }

  // One operation at the source, which stores `value` if it is a signal; or some deliveries.
  void operate(uint64_t value) {
    const uint32_t chunks = 1 + pick(5);
    Expected e;
    switch (pick(8)) {
    case 0:
    case 1:
    case 2:
      open_.insert(send_chunks(source_.plain(chunks), chunks));
      break;
    case 3:
      source_.fence();
      marks_before_fence_ = sent_marks_;
      before_fence_.insert(open_.begin(), open_.end());
      open_.clear();
      break;
    case 4: {
      const uint64_t group = source_.own(chunks);
      e.puts = before_fence_;
      e.marks = marks_before_fence_;
      const uint64_t put = send_chunks(group, chunks);
      e.puts.insert(put);
      e.word = pick(words_);
      send_mark(source_.signal(MarkOp::set, e.word * 8, value, group, chunks), e);
      open_.insert(put);
      break;
    }
    case 5:
      e.puts = before_fence_;
      e.marks = marks_before_fence_;
      e.word = pick(words_);
      send_mark(source_.signal(MarkOp::set, e.word * 8, value, 0, 0), e);
      break;
    case 6:
      if (pick(4)) break;
      for (uint64_t i = 0; i < puts_; i++)
        if (missing_.count(i)) e.puts.insert(i);
      e.flush = true;
      send_mark(source_.flush(), e);
      break;
    default:
      for (uint32_t i = pick(20); i; i--) deliver();
    }
  }

  uint64_t send_chunks(uint64_t group, uint32_t chunks) {
    missing_[puts_] = chunks;
    for (uint32_t i = 0; i < chunks; i++) network_.push_back({false, (uint32_t)(group % window_.groups), puts_, {}});
    return puts_++;
  }

  void send_mark(const MarkRecord& mark, Expected expected) {
    CHECK(mark.sequence == (uint32_t)sent_marks_, "marks are numbered in order");
    marks_[sent_marks_++] = std::move(expected);
    network_.push_back({true, 0, 0, mark});
  }

  // Delivers one thing, a packet or an acknowledgement; false when nothing is on its way.
  bool deliver() {
    if (!network_.empty() && (acks_.empty() || pick(4))) {
      deliver_packet();
      return true;
    }
    if (acks_.empty()) return false;
    const size_t i = pick((uint32_t)acks_.size());
    CHECK(source_.acknowledge(acks_[i]), "seed %u: acknowledgement refused", seed_);
    acks_.erase(acks_.begin() + (long)i);
    return true;
  }

  void deliver_packet() {
    const size_t i = pick((uint32_t)network_.size());
    const Packet packet = network_[i];
    network_[i] = network_.back();
    network_.pop_back();
    if (packet.is_mark) {
      CHECK(target_.mark(packet.mark), "seed %u: mark refused", seed_);
    } else {
      if (!--missing_[packet.put]) missing_.erase(packet.put);
      CHECK(target_.chunk(packet.group), "seed %u: chunk refused", seed_);
    }
    apply_ready();
    if (target_.complete_groups() - acked_groups_ >= window_.groups / 4 ||
        target_.applied_marks() - acked_marks_ >= window_.marks / 4 || !pick(8)) {
      acked_groups_ = target_.complete_groups();
      acked_marks_ = target_.applied_marks();
      acks_.push_back({RecordType::ack, {}, (uint32_t)acked_groups_, (uint32_t)acked_marks_, 0});
    }
  }

  void apply_ready() {
    MarkRecord mark;
    while (target_.next(&mark)) {
      auto it = marks_.find(mark.sequence);
      CHECK(it != marks_.end(), "mark %u applied twice", mark.sequence);
      for (uint64_t put : it->second.puts) CHECK(!missing_.count(put), "seed %u: mark before put", seed_);
      CHECK(marks_.begin()->first >= it->second.marks, "seed %u: a mark after a fence overtook one before it", seed_);
      if (it->second.flush) CHECK(it == marks_.begin(), "seed %u: a flush overtook a mark", seed_);
      if (mark.op == MarkOp::set) {
        uint64_t& last = last_on_word_[it->second.word];
        CHECK(mark.value > last, "seed %u: word %d went from %d to %d", seed_, (int)it->second.word, (int)last,
              (int)mark.value);
        last = mark.value;
      }
      marks_.erase(it);
      applied_++;
    }
    CHECK(target_.applied_marks() <= sent_marks_, "more applied than sent");
  }

  const uint32_t seed_;
  std::mt19937 random_;
  const OrderWindow window_ = random_window();
  OrderSource source_{window_};
  OrderTarget target_{window_};
  const uint32_t words_ = 1 + pick(6);
  std::vector<Packet> network_;
  std::vector<AckRecord> acks_;
  std::set<uint64_t> open_, before_fence_; // puts since / before the latest fence
  uint64_t marks_before_fence_ = 0;
  uint64_t puts_ = 0, sent_marks_ = 0, acked_groups_ = 0, acked_marks_ = 0;
  // The test's model of the target.
  std::map<uint64_t, uint32_t> missing_; // chunks of put i that have not arrived
  std::map<uint64_t, Expected> marks_;   // by sequence
  std::map<uint64_t, uint64_t> last_on_word_;
  uint64_t applied_ = 0;
};

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
  for (int seed = 0; seed < seeds; seed++) Run((uint32_t)seed).go(operations);
  refusals();
  std::puts("ok");
  return 0;
}
