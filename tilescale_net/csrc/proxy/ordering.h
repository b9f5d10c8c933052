// Ordering by counting, for networks that deliver nothing in order. No network, no threads, no memory accesses here.
//
// A stream is all traffic from one PE to another. Its data chunks belong to numbered *groups*:
//   - each put_signal is a separate group;
//   - plain puts join the open group, which the first signal or flush after a fence closes.
// Every chunk names its group (modulo the window) in its immediate. A *mark* travels in a message. It states the number
// of chunks of its own group and of the group that it closes, and what must precede it: complete groups, and one
// earlier mark or all marks up to one. The target applies a mark once it has counted all of these: in any order of
// arrival, without a drain and without a "last chunk".
//
// Marks on one word are applied in the order of issue: the source remembers the last mark per word (in a small hashed
// table; a collision only orders more than necessary). A mark after a fence is applied after all marks before the
// fence; the first one on its word says so, and later ones on the word follow that one. Windows bound outstanding
// groups and marks, so numbers modulo the window are unambiguous; the target's acknowledgements move the windows.
#pragma once

#include "tilescale_net/csrc/proxy/wire.h"

namespace tsn::proxy {

constexpr uint32_t kWordTable = 4096;

inline uint32_t word_slot(uint64_t offset) {
  return (uint32_t)((offset >> 3) * 0x9e3779b97f4a7c15ull >> 52) % kWordTable;
}

// The 64-bit number >= base whose low 32 bits are `low`; numbers before the base become huge.
inline uint64_t expand(uint32_t low, uint64_t base) { return base + (uint32_t)(low - (uint32_t)base); }

// Both are powers of two; equal at the source and the target of a stream.
struct OrderWindow {
  uint32_t groups = 1024;
  uint32_t marks = 1024;
};

constexpr OrderWindow kLeastWindow = {4, 4};

inline void check_window(OrderWindow w) {
  for (uint32_t n : {w.groups, w.marks})
    if (n < 4 || (n & (n - 1)))
      throw std::invalid_argument(concat("an ordering window of ", n,
                                         " is not a power of two of at least 4; the immediates may be too narrow"));
}

class OrderSource {
public:
  // `signals`: whether there will be any; they take 32 KiB.
  explicit OrderSource(OrderWindow window, bool signals = true)
      : window_(window), last_mark_(signals ? kWordTable : 0, 0) {
    check_window(window);
  }

  // Whether one more operation of any kind fits into the windows.
  bool room() const {
    return next_group_ - acked_groups_ < window_.groups && next_mark_ - acked_marks_ < window_.marks - 1;
  }

  // Numbers `chunks` chunks of a plain put: returns their group.
  uint64_t plain(uint32_t chunks) {
    if (!open_chunks_) open_group_ = next_group_++;
    open_chunks_ += chunks;
    return open_group_;
  }
  // Numbers the chunks of a put_signal; its mark must follow at once.
  uint64_t own(uint32_t) { return next_group_++; }

  void fence() { fence_ = next_group_, fence_mark_ = next_mark_; }
  // Signals wait for all chunks that were numbered so far.
  bool fenced() const { return fence_ == next_group_; }

  // The mark of a signal with an own group of `chunks` chunks (0: a bare signal, `group` is ignored).
  MarkRecord signal(MarkOp op, uint64_t offset, uint64_t value, uint64_t group, uint32_t chunks) {
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
  // A mark that is applied after everything before it, and acknowledged at once.
  MarkRecord flush() {
    MarkRecord m = blank(MarkOp::none);
    if (open_chunks_) close_open(&m);
    m.groups_before = (uint32_t)next_group_;
    m.flags = kAfterAllMarks | kReply;
    return m;
  }
  // The open group has been open for half the window, or its counter fills up: it must be closed.
  bool stale() const {
    return open_chunks_ && (next_group_ - open_group_ >= window_.groups / 2 || open_chunks_ >= 1u << 30);
  }
  MarkRecord close() {
    MarkRecord m = blank(MarkOp::none);
    close_open(&m);
    m.groups_before = (uint32_t)acked_groups_;
    return m;
  }

  // False: it acknowledges more than was sent.
  bool acknowledge(const AckRecord& ack) {
    // Acknowledgements overtake one another: only the furthest counts.
    const int32_t groups = (int32_t)(ack.groups - (uint32_t)acked_groups_);
    const int32_t marks = (int32_t)(ack.marks - (uint32_t)acked_marks_);
    if (groups > 0 && (uint64_t)groups > next_group_ - acked_groups_) return false;
    if (marks > 0 && (uint64_t)marks > next_mark_ - acked_marks_) return false;
    if (groups > 0) acked_groups_ += groups;
    if (marks > 0) acked_marks_ += marks;
    return true;
  }

  uint64_t next_mark() const { return next_mark_; }
  // Number of groups and marks so far: grows with everything sent after a flush mark.
  uint64_t issued() const { return next_group_ + next_mark_; }
  // Every mark before this one is applied.
  uint64_t settled_marks() const { return acked_marks_; }
  uint64_t bytes() const { return last_mark_.size() * sizeof last_mark_[0]; }
  // Chunks were numbered that no settled mark covers, or marks are unsettled.
  bool unsettled() const { return acked_groups_ != next_group_ || acked_marks_ != next_mark_; }

private:
  MarkRecord blank(MarkOp op) {
    MarkRecord m = {};
    m.type = RecordType::mark;
    m.op = op;
    m.sequence = m.after_mark = (uint32_t)next_mark_++;
    return m;
  }
  void close_open(MarkRecord* mark) {
    mark->closed_group = (uint32_t)open_group_;
    mark->closed_count = open_chunks_;
    open_chunks_ = 0;
  }

  OrderWindow window_;
  uint64_t next_group_ = 0, acked_groups_ = 0;
  uint64_t next_mark_ = 0, acked_marks_ = 0;
  uint64_t open_group_ = 0;
  uint32_t open_chunks_ = 0;        // 0: no group is open
  uint64_t fence_ = 0;              // groups before this one are before the latest fence
  uint64_t fence_mark_ = 0;         // same for marks
  std::vector<uint64_t> last_mark_; // by hash of the word: 1 + the latest mark on it, 0 if none
};

class OrderTarget {
public:
  explicit OrderTarget(OrderWindow window)
      : window_(window), groups_(window.groups), marks_(window.marks), state_(window.marks, absent) {
    check_window(window);
  }

  // A chunk of the group whose number is `group` modulo the window has its data in place (or in the queue of an
  // in-order writer). False: no such group can be outstanding, the peer broke the protocol.
  bool chunk(uint32_t group) {
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
  // A mark arrived. False: protocol violation.
  bool mark(const MarkRecord& record) {
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
  // Takes the next mark whose conditions are met, in a legal order of application.
  bool next(MarkRecord* out) {
    if (ready_head_ == ready_.size()) {
      ready_.clear();
      ready_head_ = 0;
      return false;
    }
    *out = marks_[ready_[ready_head_++] & (window_.marks - 1)];
    return true;
  }

  OrderWindow window() const { return window_; }
  uint64_t complete_groups() const { return base_group_; } // all before are complete
  uint64_t applied_marks() const { return base_mark_; }    // all before were handed out by next()
  uint64_t bytes() const { return groups_.size() * sizeof(Group) + marks_.size() * sizeof(MarkRecord) + state_.size(); }

private:
  struct Group {
    uint32_t arrived = 0;
    uint32_t expected = 0; // 0: not known yet
    uint32_t waiting = 0;  // 1 + slot of the mark whose own group this is, 0 if none
  };
  enum State : uint8_t { absent, pending, applied };

  bool expect(uint32_t group, uint32_t count, uint32_t waiting) {
    const uint64_t number = expand(group, base_group_);
    if (number - base_group_ >= window_.groups) return false;
    Group& g = groups_[number & (window_.groups - 1)];
    if (g.expected || g.arrived > count) return false;
    g.expected = count;
    if (g.arrived != count) g.waiting = waiting;
    return true;
  }
  bool complete(uint32_t group) const {
    if ((int32_t)(group - (uint32_t)base_group_) < 0) return true;
    const Group& g = groups_[group & (window_.groups - 1)];
    return g.expected && g.arrived == g.expected;
  }
  bool applicable(uint64_t sequence) const {
    const MarkRecord& m = marks_[sequence & (window_.marks - 1)];
    // A signed distance: the groups may lie before the base, which stops at the first incomplete one.
    if ((int32_t)(m.groups_before - (uint32_t)base_group_) > 0) return false;
    if (m.flags & kAfterAllMarks) return (int32_t)(m.after_mark - (uint32_t)base_mark_) <= 0;
    if (m.after_mark == m.sequence) return true;
    return done_before(sequence - (uint32_t)(m.sequence - m.after_mark));
  }
  bool done_before(uint64_t sequence) const {
    return sequence < base_mark_ || state_[sequence & (window_.marks - 1)] == applied;
  }
  void consider(uint64_t sequence) {
    blocked_.push_back(sequence);
    rescan();
  }
  void advance_groups() {
    const uint64_t before = base_group_;
    for (;; base_group_++) {
      Group& g = groups_[base_group_ & (window_.groups - 1)];
      if (!g.expected || g.arrived != g.expected) break;
      g = Group();
    }
    if (base_group_ != before) rescan();
  }
  void rescan() {
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

  OrderWindow window_;
  std::vector<Group> groups_;
  std::vector<MarkRecord> marks_;
  std::vector<uint8_t> state_;
  uint64_t base_group_ = 0, base_mark_ = 0;
  std::vector<uint64_t> blocked_; // pending marks that wait for more than their own group
  std::vector<uint64_t> ready_;   // handed out in this order from ready_head_ on
  size_t ready_head_ = 0;
};

} // namespace tsn::proxy
