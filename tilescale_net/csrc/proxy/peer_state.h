// A proxy thread's state of one peer: operations accepted for it, flushes that wait, ordering in both directions.
#pragma once

#include "tilescale_net/csrc/proxy/options.h"
#include "tilescale_net/csrc/proxy/outbox.h"

namespace tsn::proxy {

// A read or write that has been accepted and numbered, and not yet posted to its end.
struct Op {
  Command command = Command::none; // for messages about it; put or get
  uint32_t group = 0;              // of its chunks; writes only
  uint32_t interval = 0;
  uint32_t get = 0; // index into the thread's gets; reads only
  uint64_t remote = 0, local = 0, bytes = 0;
  uint64_t chunk = 0; // size of one
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
  // `helping_`: another thread is the peer's home, see handover.h.
  PeerState(int pe_, OrderWindow window, bool helping_)
      : pe(pe_), out(helping_ ? kLeastWindow : window, !helping_), in(helping_ ? kLeastWindow : window),
        helping(helping_) {
    intervals.push(Interval());
  }

  const int pe;
  OrderSource out;
  OrderTarget in;
  bool confirms = false; // a write's completion here means that the peer's kernels see its data
  // Where several threads serve the peer, see handover.h.
  bool helped = false;       // others may get chunks of ours, and have `given` of them
  const bool helping;        // another thread is its home: of all this, only the way to the peer is used
  RemoteRegion heap = -1;    // the peer's heap, where the transport reaches it
  RemoteRegion staging = -1; // its staging slots, else; those for this PE start at first_slot
  uint64_t first_slot = 0;
  uint32_t their_slots = 0; // that many of them
  Outbox outbox;
  Ring<Op> ops;
  bool active = false; // listed among the peers with something to post

  Ring<Interval> intervals; // the last one is open
  uint32_t first_interval = 0;
  Interval& interval(uint32_t number) { return intervals[number - first_interval]; }
  uint32_t open_interval() { return first_interval + (uint32_t)intervals.size() - 1; }
  // Something was sent since the latest flush mark whose completion here does not mean completion at the peer.
  bool needs_flush_mark = false;
  // `out.issued()` behind the mark that the last drain has sent to the peer.
  uint64_t drained_up_to = 0;

  uint32_t in_flight = 0;          // posted chunks
  uint32_t own_pieces = 0;         // of operations, posted or being staged
  std::vector<uint16_t> credits;   // staging slots of the peer that are free
  std::vector<uint8_t> has_credit; // by slot of the peer: listed among them
  std::vector<uint16_t> freed;     // own slots to be given back to it
  std::vector<uint8_t> slot_full;  // by own slot: the peer has filled it and not got it back
  uint32_t pending_gets = 0;       // gets by request that are unanswered
  Ring<GetRecord> get_requests;    // gets that the peer requested

  // Immediates: what a peer's completion queue has to hold until its proxy looks.
  uint64_t immediate_limit = 0;                          // that the peer has room for before it reports them
  uint64_t immediates_sent = 0, immediates_taken = 0;    // to the peer, and those that it has reported
  uint64_t immediates_seen = 0, immediates_reported = 0; // from the peer, likewise

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

  uint64_t chunk = 0;            // bytes of the largest one
  uint32_t their_slot_bytes = 0; // size of the peer's staging slots,
  uint32_t slot_bytes = 0;       // of which as much is used as a send slot here has
  std::vector<uint32_t> given;   // chunks that each helper has; helper i is thread number i + 1
  uint32_t given_pieces() const {
    uint32_t n = 0;
    for (const uint32_t g : given) n += g;
    return n;
  }
};

} // namespace tsn::proxy
