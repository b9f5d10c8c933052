// A proxy thread's state of one peer: operations accepted for it, flushes that wait, ordering in both directions.
#pragma once

#include "tilescale_net/csrc/proxy/options.h"
#include "tilescale_net/csrc/proxy/stats.h"
#include "tilescale_net/csrc/proxy/wire.h"

namespace tsn::proxy {

// A queue over a power-of-two array that grows when it must and never shrinks: no allocation in steady state.
template <class T>
class Ring {
public:
  bool empty() const { return head_ == tail_; }
  size_t size() const { return tail_ - head_; }
  T& front() { return slots_[head_ & (slots_.size() - 1)]; }
  T& back() { return slots_[(tail_ - 1) & (slots_.size() - 1)]; }
  // The i-th element from the front.
  T& operator[](size_t i) { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  void pop() { head_++; }
  void push(T value) { add() = std::move(value); }
  // A new last element, to be filled in place; it has stale contents.
  T& add() {
    if (size() == slots_.size()) grow();
    return slots_[tail_++ & (slots_.size() - 1)];
  }

private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    const size_t n = size();
    for (size_t i = 0; i < n; i++) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    head_ = 0;
    tail_ = n;
  }

  std::vector<T> slots_;
  size_t head_ = 0, tail_ = 0;
};

// Elements by index; an index is valid until its release.
template <class T>
class Table {
public:
  // A free index; its element has stale contents.
  uint32_t take() {
    if (free_.empty()) {
      free_.push_back((uint32_t)elements_.size());
      elements_.emplace_back();
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void release(uint32_t index) { free_.push_back(index); }
  T& operator[](size_t index) { return elements_[index]; }
  size_t size() const { return elements_.size(); }

private:
  std::vector<T> elements_;
  std::vector<uint32_t> free_;
};

// Outgoing records to one peer, packed into as few messages as possible.
class Outbox {
public:
  void set_limit(uint32_t message_bytes) { limit_ = message_bytes & ~7u; }

  // Room for a record of `bytes` bytes, a multiple of 8; the caller fills it at once.
  char* append(uint32_t bytes) {
    if (messages_.empty() || messages_.back().bytes + bytes > limit_) {
      Message m;
      if (spare_.empty()) {
        m.data.reset(new char[limit_]);
      } else {
        m.data = std::move(spare_.back());
        spare_.pop_back();
      }
      messages_.push(std::move(m));
    }
    Message& m = messages_.back();
    char* place = m.data.get() + m.bytes;
    m.bytes += bytes;
    return place;
  }

  template <class Record>
  void append_record(const Record& record) {
    static_assert(sizeof(Record) % 8 == 0, "records are multiples of 8 bytes");
    std::memcpy(append(sizeof record), &record, sizeof record);
  }

  bool empty() const { return messages_.empty(); }
  size_t backlog() const { return messages_.size(); }

  // Posts messages until all are gone, or the transport takes no more.
  Post flush(Transport* transport, int rail, int peer, ProxyStats* stats) {
    while (!messages_.empty()) {
      Message& m = messages_.front();
      const Post post = transport->post_message(rail, peer, m.data.get(), m.bytes, kSilent);
      if (post != Post::ok) return post;
      stats->messages.add();
      m.bytes = 0;
      spare_.push_back(std::move(m.data));
      messages_.pop();
    }
    return Post::ok;
  }

private:
  struct Message {
    std::unique_ptr<char[]> data;
    uint32_t bytes = 0;
  };
  uint32_t limit_ = 256;
  Ring<Message> messages_;
  std::vector<std::unique_ptr<char[]>> spare_;
};

// A read or write that has been accepted and numbered, and not yet posted to its end.
struct Op {
  Command command = Command::none; // for messages about it; put or get
  uint32_t group = 0;              // of its chunks; writes only
  uint32_t interval = 0;
  uint32_t get = 0; // index into the thread's gets; reads only
  uint64_t remote = 0, local = 0, bytes = 0;
  uint64_t chunk = 0;  // size of one
  bool marked = false; // staged writes: the next of PeerState::marks leaves with its end
};

// The operations between two flushes. Intervals end in order: a flush waits for all before it.
struct Interval {
  uint64_t outstanding = 0; // chunks accepted and not complete
  bool closed = false;      // by a flush:
  bool has_mark = false;    // which also waits for the peer to acknowledge `mark`
  uint64_t mark = 0;
  uint32_t flush = 0; // index into the thread's flushes
};

struct PeerState {
  // `owned_elsewhere_`: another thread is the peer's owner, see WorkTransfer.
  PeerState(int pe_, OrderWindow window, bool owned_elsewhere_)
      : pe(pe_), out(owned_elsewhere_ ? kLeastWindow : window, !owned_elsewhere_),
        in(owned_elsewhere_ ? kLeastWindow : window), owned_elsewhere(owned_elsewhere_) {
    intervals.push(Interval());
  }

  const int pe;
  OrderSource out;
  OrderTarget in;
  bool confirms = false; // a write's completion here means that the peer's kernels see its data
  // Where several threads serve the peer, see WorkTransfer.
  bool shared = false;        // others may get chunks of ours, and have `delegated` of them
  const bool owned_elsewhere; // another thread is its owner: only the path to the peer is used
  RemoteRegion heap = -1;     // the peer's heap, if the transport reaches it
  RemoteRegion staging = -1;  // its staging slots, else; those for this PE start at first_slot
  uint64_t first_slot = 0;
  uint32_t their_slots = 0; // that many of them
  Outbox outbox;
  Ring<Op> ops;
  Ring<MarkRecord> marks; // of those among `ops` that are `marked`
  bool active = false;    // listed among the peers with something to post

  Ring<Interval> intervals; // the last one is open
  uint32_t first_interval = 0;
  // Of chunks of an interval that have ended, successfully or not. Flushes do not wait for an excluded PE: its
  // intervals may be gone.
  void settle(uint32_t interval, uint64_t chunks) {
    const uint32_t i = interval - first_interval;
    if (i < intervals.size()) intervals[i].outstanding -= chunks;
  }
  uint32_t open_interval() { return first_interval + (uint32_t)intervals.size() - 1; }
  // Something was sent after the latest flush mark whose local completion does not imply completion at the peer.
  bool needs_flush_mark = false;
  // `out.issued()` behind the mark that the last drain has sent to the peer.
  uint64_t drained_up_to = 0;

  uint32_t in_flight = 0;          // posted chunks
  uint32_t own_pieces = 0;         // of operations, posted or being staged
  std::vector<uint16_t> credits;   // staging slots of the peer that are free
  std::vector<uint8_t> has_credit; // by slot of the peer: listed among them
  std::vector<uint16_t> freed;     // own slots to be given back to it
  std::vector<uint8_t> slot_full;  // by own slot: filled by the peer and not returned
  uint32_t pending_gets = 0;       // gets by request that are unanswered
  Ring<GetRecord> get_requests;    // gets that the peer requested

  // Immediates: entries of the peer's completion queue until its proxy polls.
  uint64_t immediate_limit = 0;                          // that the peer has room for before it reports them
  uint64_t immediates_sent = 0, immediates_taken = 0;    // to the peer, and those that it has reported
  uint64_t immediates_seen = 0, immediates_reported = 0; // the same from the peer

  // Acknowledgements owed to the peer.
  bool reply = false;       // it waits for one
  bool ack_pending = false; // one is due when `ack_position` of the heap's incoming work has completed
  uint64_t ack_position = 0;
  uint64_t ack_groups = 0, ack_marks = 0;     // its content
  uint64_t acked_groups = 0, acked_marks = 0; // content of the latest one
  bool ack_due = false;                       // listed among the peers with news for acknowledgements
  bool has_messages = false;                  // listed among the peers with messages to post

  // Signs of life, for the deadline.
  uint64_t progress = 0, progress_seen = 0;
  uint64_t waiting_since = 0;
  bool backpressured = false; // the transport answered `again` since the latest progress

  uint64_t chunk = 0;              // bytes of the largest one
  uint32_t their_slot_bytes = 0;   // size of the peer's staging slots,
  uint32_t slot_bytes = 0;         // of which as much is used as a send slot here has
  std::vector<uint32_t> delegated; // chunks that each worker has; worker i is thread number i + 1
  uint32_t given_pieces() const {
    uint32_t n = 0;
    for (const uint32_t g : delegated) n += g;
    return n;
  }
};

// Work that threads of one proxy transfer when several serve one peer.
//
// A peer has one *owner* thread, which alone takes its descriptors, numbers them and applies arrivals: it keeps the
// order, whichever thread carries the data. *Workers* post large chunks from the owner through their own endpoints,
// to the peer's workers, and notify the owners on both sides: "posted and complete" and "arrived, of this group".
// Arrivals are counted and nothing relies on their order, so the endpoint of a chunk does not matter.
struct WorkTransfer {
  enum Kind : uint8_t {
    piece,    // to a worker: post `op`
    complete, // to the owner: `pieces` chunks that it gave; `op`: their interval and, of a read, the bytes
    arrived,  // to the owner: a chunk of op.group is in the heap
  };
  Kind kind;
  int pe;
  int worker = 0; // index among the peer's workers
  uint32_t pieces = 1;
  Op op;
};

// Filled by any thread, emptied by one.
class Inbox {
public:
  void push(const WorkTransfer& item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(item);
    filled_.store(true, std::memory_order_release);
  }
  bool empty() const { return !filled_.load(std::memory_order_acquire); }
  // Everything so far; `out` is emptied first.
  void take(std::vector<WorkTransfer>* out) {
    out->clear();
    std::lock_guard<std::mutex> lock(mutex_);
    items_.swap(*out);
    filled_.store(false, std::memory_order_release);
  }

private:
  std::mutex mutex_;
  std::vector<WorkTransfer> items_;
  std::atomic<bool> filled_{false};
};

} // namespace tsn::proxy
