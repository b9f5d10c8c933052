// Peers' traffic: data to count, records to apply, acknowledgements of our own.
#include "tilescale_net/csrc/proxy/worker.h"

namespace tsn::proxy {

void Worker::protocol_error(int pe, const std::string& what) {
  fail("FabricError",
       concat("PE ", pe, " broke the protocol: ", what, "; do all ranks run the same version with the same options?"),
       pe, "", 0);
}

bool Worker::poll_transport() {
  const int n = transport_->poll(events_.data(), (int)events_.size());
  if (n == 0) {
    // Progress may free room without an event.
    for (Rail& r : rails_) r.full = false;
    return false;
  }
  for (Rail& r : rails_) r.full = false;
  for (int i = 0; i < n; i++) {
    const Event& e = events_[i];
    switch (e.kind) {
    case Event::done:
      on_completion((uint32_t)e.cookie);
      break;
    case Event::immediate:
      on_immediate(e.imm);
      break;
    case Event::message:
      on_message(e);
      break;
    case Event::failed:
      failed_event(e);
      return true;
    }
  }
  return true;
}

void Worker::mark_ack_due(PeerState* s) {
  if (s->ack_due) return;
  s->ack_due = true;
  acks_due_.push_back(s);
}

void Worker::on_immediate(uint32_t imm) {
  const uint32_t pe = imm >> group_bits_;
  if (pe >= peers_.size() || !peers_[pe]) return stats_.rejected_messages.add();
  PeerState* s = peers_[pe].get();
  const uint32_t low = imm & ((1u << group_bits_) - 1);
  if (staging_) {
    if (!on_slot(s, low)) return protocol_error(s->pe, concat("staging slot ", low, " holds no valid data"));
  } else {
    s->immediates_seen++;
    stats_.chunks_in.add();
    if (s->owned_elsewhere) notify_arrival(s, low);
    else if (!s->in.chunk(low)) return protocol_error(s->pe, concat("more data than announced for group ", low));
  }
  apply(s);
}

// Copies the chunks of a slot into the heap and counts them, while the copies are still in flight: a later signal
// follows them on the same path. Then it takes the records: the source has stored them before it posted the write, and
// the network reports the immediate after all of the write has arrived.
bool Worker::on_slot(PeerState* s, uint32_t slot) {
  if (slot >= s->slot_full.size() || s->slot_full[slot]) return false;
  SlotReader pieces(staging_->slot(peer_index_[s->pe], slot), staging_->shape().slot_bytes, bounds_);
  PieceHeader piece;
  const char* data;
  while (pieces.next(&piece, &data)) {
    memory_->copy_in(piece.offset, data, piece.bytes);
    stats_.chunks_in.add();
    if (piece.group == kUncounted) continue;
    // Another thread's signals do not follow this thread's copies: notify it when the chunk has arrived.
    if (s->owned_elsewhere) arrived_.push({memory_->in_position(), s, piece.group, Arrived::piece});
    else if (!s->in.chunk(piece.group)) return false;
  }
  if (!pieces.good() || !on_records(s, pieces.records(), pieces.record_bytes())) return false;
  s->slot_full[slot] = 1;
  arrived_.push({memory_->in_position(), s, slot, Arrived::slot});
  return true;
}

void Worker::on_message(const Event& e) {
  if (e.peer < 0 || (size_t)e.peer >= peers_.size() || !peers_[e.peer]) return stats_.rejected_messages.add();
  PeerState* s = peers_[e.peer].get();
  if (on_records(s, static_cast<const char*>(e.data), e.bytes)) apply(s);
}

// The records of a message or of a slot. False: one was invalid, or the peer gave up; the failure is known.
bool Worker::on_records(PeerState* s, const char* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    Record record;
    stats_.records_in.add();
    if (!read_record(data + at, bytes - at, bounds_, &record) || !on_record(s, record)) {
      protocol_error(s->pe, concat("record of type ", (int)(uint8_t)data[at], " is malformed or out of its window"));
      return false;
    }
    if (record.type == RecordType::abort) return false;
    at += record.bytes;
  }
  return true;
}

// Handles one record. False: it is invalid here and now.
bool Worker::on_record(PeerState* s, const Record& record) {
  const bool of_the_way = record.type == RecordType::ack || record.type == RecordType::credit;
  if (s->owned_elsewhere && !of_the_way && record.type != RecordType::abort) return false;
  switch (record.type) {
  case RecordType::mark:
    return on_mark(s, record.mark);
  case RecordType::value:
    memory_->write(record.value.offset, record.payload, record.value.bytes);
    return s->in.chunk(record.value.group);
  case RecordType::ack:
    return on_ack(s, record.ack);
  case RecordType::credit:
    return on_credit(s, record.credit);
  case RecordType::request:
    if (!staging_ || s->get_requests.size() >= kMaxGetRequests) return false;
    s->get_requests.push(record.request);
    serve_get_requests(s);
    return true;
  case RecordType::abort:
    on_abort(s, record);
    return true;
  }
  return false;
}

bool Worker::on_mark(PeerState* s, const MarkRecord& mark) {
  if (mark.op == MarkOp::answer) {
    // Answers a pending get by request of this peer.
    if (!staging_ || mark.value >= gets_.size()) return false;
    Get& get = gets_[mark.value];
    if (!get.queue || get.peer != s || get.answered) return false;
    get.answered = true;
  }
  return s->in.mark(mark);
}

bool Worker::on_ack(PeerState* s, const AckRecord& ack) {
  // Acknowledgements overtake one another: only the furthest counts.
  const auto taken = (int32_t)(ack.chunks - (uint32_t)s->immediates_taken);
  if (taken > 0 && (uint64_t)taken > s->immediates_sent - s->immediates_taken) return false;
  if (!s->out.acknowledge(ack)) return false;
  if (taken > 0) s->immediates_taken += (uint64_t)taken;
  s->progress++;
  s->backpressured = false;
  complete_ready_flushes(s);
  return true;
}

bool Worker::on_credit(PeerState* s, const CreditRecord& credit) {
  if (!staging_) return false;
  for (int i = 0; i < credit.count; i++) {
    const uint16_t slot = credit.slots[i];
    if (slot >= s->their_slots || s->has_credit[slot]) return false;
    s->has_credit[slot] = 1;
    s->credits.push_back(slot);
  }
  s->progress++;
  if (!s->ops.empty()) activate(s);
  return true;
}

void Worker::on_abort(PeerState* s, const Record& record) {
  if (proxy_state_->excluded(s->pe)) return;
  const std::string pe = concat("PE ", s->pe);
  const std::string reason = printable(record.payload, record.abort.bytes);
  fail("PeerLost",
       pe + (reason.empty() ? " was aborted; look at the ranks' output for the reason"
                            : " gave up, for this reason: " + reason),
       s->pe, "", 0);
}

// Gets that the peer requested, as puts into its heap.
void Worker::serve_get_requests(PeerState* s) {
  while (!s->get_requests.empty() && has_room(*s)) {
    const GetRecord g = s->get_requests.front();
    s->get_requests.pop();
    if (s->out.stale()) append_mark(s, s->out.close());
    enqueue_write(s, Command::put, g.target, g.source, g.bytes, MarkOp::answer, 0, g.id);
  }
  if (!s->get_requests.empty()) mark_ack_due(s);
}

void Worker::apply(PeerState* s) {
  MarkRecord m;
  while (s->in.next(&m)) {
    if (m.op == MarkOp::set) memory_->set(m.offset, m.value);
    else if (m.op == MarkOp::add) memory_->add(m.offset, m.value);
    else if (m.op == MarkOp::answer) arrived_.push({memory_->in_position(), s, (uint32_t)m.value, Arrived::answer});
    if (m.op == MarkOp::set || m.op == MarkOp::add) {
      stats_.signals_applied.add();
      if (trace_) trace_->delivered(s->pe, m.offset, m.value);
    }
    if (m.flags & kReply) {
      memory_->settle_rdma(); // plain puts are visible once they are known to be complete
      s->reply = true;
    }
  }
  mark_ack_due(s);
}

// Slots and gets whose data has reached the heap. One reader of the positions serves all peers: they only rise.
void Worker::finish_arrived() {
  const uint64_t completed = memory_->in_completed();
  while (!arrived_.empty() && arrived_.front().position <= completed) {
    const Arrived a = arrived_.front();
    arrived_.pop();
    PeerState* s = a.peer;
    if (a.kind == Arrived::piece) {
      notify_arrival(s, a.index);
      continue;
    }
    if (a.kind == Arrived::slot) {
      s->slot_full[a.index] = 0;
      s->freed.push_back((uint16_t)a.index);
      mark_ack_due(s);
      continue;
    }
    s->pending_gets--;
    s->progress++;
    Get& g = gets_[a.index];
    s->settle(g.interval, 1);
    finish_get(a.index, g.remaining);
    complete_ready_flushes(s);
  }
}

// Acknowledgements and credits: at once if the peer waits, otherwise when a good part of its window is used. A message
// of its own for each slot would cost both sides as much as the slot itself.
void Worker::acknowledge() {
  const uint64_t completed = memory_->in_completed();
  for (size_t i = 0; i < acks_due_.size();) {
    PeerState* s = acks_due_[i];
    if (!s->get_requests.empty()) serve_get_requests(s);
    if (!s->ack_pending && (s->reply || s->in.complete_groups() - s->acked_groups >= s->in.window().groups / 4 ||
                            s->in.applied_marks() - s->acked_marks >= s->in.window().marks / 4 ||
                            s->immediates_seen - s->immediates_reported >= (immediate_limit_ + 3) / 4)) {
      s->ack_pending = true;
      s->ack_position = memory_->in_position();
      s->ack_groups = s->in.complete_groups();
      s->ack_marks = s->in.applied_marks();
      s->reply = false;
    }
    if (s->ack_pending && s->ack_position <= completed) {
      AckRecord a = {};
      a.type = RecordType::ack;
      a.groups = (uint32_t)s->ack_groups;
      a.marks = (uint32_t)s->ack_marks;
      a.chunks = (uint32_t)s->immediates_seen;
      s->immediates_reported = s->immediates_seen;
      s->outbox.append_record(a);
      s->acked_groups = s->ack_groups;
      s->acked_marks = s->ack_marks;
      s->ack_pending = false;
      stats_.acks_sent.add();
      mark_has_messages(s);
    }
    // Fewer than a quarter of its slots are kept back here, so the peer never runs out of them.
    const bool credits_due = s->freed.size() >= std::max<size_t>(1, s->slot_full.size() / 4) || !s->outbox.empty();
    while (credits_due && !s->freed.empty()) {
      CreditRecord c = {};
      c.type = RecordType::credit;
      for (; c.count < kCreditsPerRecord && !s->freed.empty(); s->freed.pop_back())
        c.slots[c.count++] = s->freed.back();
      s->outbox.append_record(c);
      mark_has_messages(s);
    }
    if (s->ack_pending || s->reply || !s->get_requests.empty()) {
      i++;
      continue;
    }
    s->ack_due = false;
    acks_due_[i] = acks_due_.back();
    acks_due_.pop_back();
  }
}

} // namespace tsn::proxy
