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

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tsn::proxy {

// Both are powers of two; equal at the source and the target of a stream.
struct OrderWindow {
  uint32_t groups = 1024;
  uint32_t marks = 1024;
};

constexpr OrderWindow kLeastWindow = {4, 4};

class OrderSource {
public:
  // `signals`: whether there will be any; they take 32 KiB.
  explicit OrderSource(OrderWindow window, bool signals = true);

  // Whether one more operation of any kind fits into the windows.
  bool room() const {
    return next_group_ - acked_groups_ < window_.groups && next_mark_ - acked_marks_ < window_.marks - 1;
  }

  // Numbers `chunks` chunks of a plain put: returns their group.
  uint64_t plain(uint32_t chunks);
  // Numbers the chunks of a put_signal; its mark must follow at once.
  uint64_t own(uint32_t chunks);

  void fence() { fence_ = next_group_, fence_mark_ = next_mark_; }
  // Signals wait for all chunks that were numbered so far.
  bool fenced() const { return fence_ == next_group_; }

  // The mark of a signal with an own group of `chunks` chunks (0: a bare signal, `group` is ignored).
  MarkRecord signal(MarkOp op, uint64_t offset, uint64_t value, uint64_t group, uint32_t chunks);
  // A mark that is applied after everything before it, and acknowledged at once.
  MarkRecord flush();
  // The open group has been open for half the window, or its counter fills up: it must be closed.
  bool stale() const {
    return open_chunks_ && (next_group_ - open_group_ >= window_.groups / 2 || open_chunks_ >= 1u << 30);
  }
  MarkRecord close();

  // False: it acknowledges more than was sent.
  bool acknowledge(const AckRecord& ack);

  uint64_t next_mark() const { return next_mark_; }
  // Number of groups and marks so far: grows with everything sent after a flush mark.
  uint64_t issued() const { return next_group_ + next_mark_; }
  // Every mark before this one is applied.
  uint64_t settled_marks() const { return acked_marks_; }
  uint64_t bytes() const { return last_mark_.size() * sizeof last_mark_[0]; }
  // Chunks were numbered that no settled mark covers, or marks are unsettled.
  bool unsettled() const { return acked_groups_ != next_group_ || acked_marks_ != next_mark_; }

private:
  MarkRecord blank(MarkOp op);
  void close_open(MarkRecord* mark);

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
  explicit OrderTarget(OrderWindow window);

  // A chunk of the group whose number is `group` modulo the window has its data in place (or in the queue of an
  // in-order writer). False: no such group can be outstanding, the peer broke the protocol.
  bool chunk(uint32_t group);
  // A mark arrived. False: protocol violation.
  bool mark(const MarkRecord& record);
  // Takes the next mark whose conditions are met, in a legal order of application.
  bool next(MarkRecord* out);

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

  bool expect(uint32_t group, uint32_t count, uint32_t waiting);
  bool complete(uint32_t group) const;
  bool applicable(uint64_t sequence) const;
  bool done_before(uint64_t sequence) const;
  void consider(uint64_t sequence);
  void advance_groups();
  void rescan();

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
