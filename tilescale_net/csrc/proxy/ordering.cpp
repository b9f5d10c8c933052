#include "tilescale_net/csrc/proxy/ordering.h"
#include "tilescale_net/csrc/common/text.h"

#include <stdexcept>
#include <string>

namespace tsn::proxy {
namespace {

constexpr uint32_t kWordTable = 4096;

uint32_t word_slot(uint64_t offset) { return (uint32_t)((offset >> 3) * 0x9e3779b97f4a7c15ull >> 52) % kWordTable; }

// The 64-bit number >= base whose low 32 bits are `low`; numbers before the base become huge.
uint64_t expand(uint32_t low, uint64_t base) { return base + (uint32_t)(low - (uint32_t)base); }

void check(OrderWindow w) {
  for (uint32_t n : {w.groups, w.marks})
    if (n < 4 || (n & (n - 1)))
      throw std::invalid_argument(concat("an ordering window of ", n,
                                         " is not a power of two of at least 4; the immediates may be too narrow"));
}

} // namespace

// --- source --------------------------------------------------------------------------------------------------------

OrderSource::OrderSource(OrderWindow window, bool signals) : window_(window), last_mark_(signals ? kWordTable : 0, 0) {
  check(window);
}

uint64_t OrderSource::plain(uint32_t chunks) {
  if (!open_chunks_) open_group_ = next_group_++;
  open_chunks_ += chunks;
  return open_group_;
}

uint64_t OrderSource::own(uint32_t) { return next_group_++; }

MarkRecord OrderSource::blank(MarkOp op) {
  MarkRecord m = {};
  m.type = RecordType::mark;
  m.op = op;
  m.sequence = m.after_mark = (uint32_t)next_mark_++;
  return m;
}

void OrderSource::close_open(MarkRecord* mark) {
  mark->closed_group = (uint32_t)open_group_;
  mark->closed_count = open_chunks_;
  open_chunks_ = 0;
}

MarkRecord OrderSource::signal(MarkOp op, uint64_t offset, uint64_t value, uint64_t group, uint32_t chunks) {
  MarkRecord m = blank(op);
  uint64_t& last = last_mark_[word_slot(offset)];
  if (last <= fence_mark_ && fence_mark_ > acked_marks_) {
    m.after_mark = (uint32_t)fence_mark_;
    m.flags = kAfterAllMarks;
  } else if (last > acked_marks_) {
    m.after_mark = (uint32_t)(last - 1);
  }
  last = next_mark_;
  if (open_chunks_ && open_group_ < fence_) close_open(&m);
  // A fence older than the acknowledged groups has no effect any more; its number could exceed 32 bits.
  m.groups_before = (uint32_t)(fence_ > acked_groups_ ? fence_ : acked_groups_);
  m.group = (uint32_t)group;
  m.count = chunks;
  m.offset = offset;
  m.value = value;
  return m;
}

MarkRecord OrderSource::flush() {
  MarkRecord m = blank(MarkOp::none);
  if (open_chunks_) close_open(&m);
  m.groups_before = (uint32_t)next_group_;
  m.flags = kAfterAllMarks | kReply;
  return m;
}

MarkRecord OrderSource::close() {
  MarkRecord m = blank(MarkOp::none);
  close_open(&m);
  m.groups_before = (uint32_t)acked_groups_;
  return m;
}

bool OrderSource::acknowledge(const AckRecord& ack) {
  // Acknowledgements overtake one another: only the furthest counts.
  const int32_t groups = (int32_t)(ack.groups - (uint32_t)acked_groups_);
  const int32_t marks = (int32_t)(ack.marks - (uint32_t)acked_marks_);
  if (groups > 0 && (uint64_t)groups > next_group_ - acked_groups_) return false;
  if (marks > 0 && (uint64_t)marks > next_mark_ - acked_marks_) return false;
  if (groups > 0) acked_groups_ += groups;
  if (marks > 0) acked_marks_ += marks;
  return true;
}

// --- target --------------------------------------------------------------------------------------------------------

OrderTarget::OrderTarget(OrderWindow window)
    : window_(window), groups_(window.groups), marks_(window.marks), state_(window.marks, absent) {
  check(window);
}

bool OrderTarget::complete(uint32_t group) const {
  if ((int32_t)(group - (uint32_t)base_group_) < 0) return true;
  const Group& g = groups_[group & (window_.groups - 1)];
  return g.expected && g.arrived == g.expected;
}

bool OrderTarget::chunk(uint32_t group) {
  Group& g = groups_[group & (window_.groups - 1)];
  if (g.expected && g.arrived == g.expected) return false;
  g.arrived++;
  if (g.arrived != g.expected) return true;
  const uint32_t waiting = g.waiting;
  g.waiting = 0;
  advance_groups();
  if (waiting) consider(base_mark_ + ((waiting - 1 - base_mark_) & (window_.marks - 1)));
  return true;
}

bool OrderTarget::expect(uint32_t group, uint32_t count, uint32_t waiting) {
  const uint64_t number = expand(group, base_group_);
  if (number - base_group_ >= window_.groups) return false;
  Group& g = groups_[number & (window_.groups - 1)];
  if (g.expected || g.arrived > count) return false;
  g.expected = count;
  if (g.arrived != count) g.waiting = waiting;
  return true;
}

bool OrderTarget::mark(const MarkRecord& record) {
  const uint64_t sequence = expand(record.sequence, base_mark_);
  if (sequence - base_mark_ >= window_.marks) return false;
  const uint32_t slot = (uint32_t)(sequence & (window_.marks - 1));
  if (state_[slot] != absent) return false;
  if (record.closed_count && !expect(record.closed_group, record.closed_count, 0)) return false;
  if (record.count && !expect(record.group, record.count, slot + 1)) return false;
  marks_[slot] = record;
  state_[slot] = pending;
  advance_groups();
  // A mark with an incomplete group is checked again when the group's last chunk arrives.
  if (!record.count || complete(record.group)) consider(sequence);
  return true;
}

bool OrderTarget::done_before(uint64_t sequence) const {
  return sequence < base_mark_ || state_[sequence & (window_.marks - 1)] == applied;
}

bool OrderTarget::applicable(uint64_t sequence) const {
  const MarkRecord& m = marks_[sequence & (window_.marks - 1)];
  // A signed distance: the groups may lie before the base, which stops at the first incomplete one.
  if ((int32_t)(m.groups_before - (uint32_t)base_group_) > 0) return false;
  if (m.flags & kAfterAllMarks) return (int32_t)(m.after_mark - (uint32_t)base_mark_) <= 0;
  if (m.after_mark == m.sequence) return true;
  return done_before(sequence - (uint32_t)(m.sequence - m.after_mark));
}

void OrderTarget::consider(uint64_t sequence) {
  blocked_.push_back(sequence);
  rescan();
}

void OrderTarget::advance_groups() {
  const uint64_t before = base_group_;
  for (;; base_group_++) {
    Group& g = groups_[base_group_ & (window_.groups - 1)];
    if (!g.expected || g.arrived != g.expected) break;
    g = Group();
  }
  if (base_group_ != before) rescan();
}

void OrderTarget::rescan() {
  for (bool changed = true; changed;) {
    changed = false;
    size_t kept = 0;
    for (size_t i = 0; i < blocked_.size(); i++) {
      const uint64_t sequence = blocked_[i];
      if (!applicable(sequence)) {
        blocked_[kept++] = sequence;
        continue;
      }
      state_[sequence & (window_.marks - 1)] = applied;
      ready_.push_back(sequence);
      changed = true;
      for (; state_[base_mark_ & (window_.marks - 1)] == applied; base_mark_++)
        state_[base_mark_ & (window_.marks - 1)] = absent;
    }
    blocked_.resize(kept);
  }
}

bool OrderTarget::next(MarkRecord* out) {
  if (ready_head_ == ready_.size()) {
    ready_.clear();
    ready_head_ = 0;
    return false;
  }
  *out = marks_[ready_[ready_head_++] & (window_.marks - 1)];
  return true;
}

} // namespace tsn::proxy
