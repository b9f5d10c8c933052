// What peers send: data to be counted, records to be applied, acknowledgements of our own.
#include "tilescale_net/csrc/proxy/worker.h"

namespace tsn::proxy {

void Worker::broken(int pe, const std::string& what) {
  give_up("FabricError",
          "PE " + std::to_string(pe) + " broke the protocol: " + what +
              "; do all ranks run the same version with the same options?",
          pe, "", 0);
}

bool Worker::poll_transport() {
  const int n = transport_->poll(events_.data(), (int)events_.size());
  if (n == 0) {
    // Progress may have made room without an event.
    for (Rail& r : rails_) r.full = false;
    return false;
  }
  for (Rail& r : rails_) r.full = false;
  for (int i = 0; i < n; i++) {
    const Event& e = events_[(size_t)i];
    switch (e.kind) {
    case Event::done:
      complete((uint32_t)e.cookie);
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

void Worker::touch(Stream* s) {
  if (s->touched) return;
  s->touched = true;
  touched_.push_back(s);
}

void Worker::on_immediate(uint32_t imm) {
  const uint32_t pe = imm >> group_bits_;
  if (pe >= streams_.size() || !streams_[pe]) return broken((int)pe, "data came from a PE that is not served here");
  Stream* s = streams_[pe].get();
  const uint32_t low = imm & ((1u << group_bits_) - 1);
  if (staging_) {
    if (!on_slot(s, low)) return broken(s->pe, "staging slot " + std::to_string(low) + " holds no valid pieces");
  } else {
    stats_.chunks_in.add();
    if (!s->in.chunk(low)) return broken(s->pe, "more data than announced for group " + std::to_string(low));
  }
  apply(s);
}

// Copies the pieces of a slot into the heap and counts them. They are counted while the copies are still under way:
// a signal that follows goes the same way behind them.
bool Worker::on_slot(Stream* s, uint32_t slot) {
  if (slot >= staging_->shape().slots_per_peer) return false;
  const char* base = staging_->slot(peer_index_[(size_t)s->pe], slot);
  SlotHeader header;
  std::memcpy(&header, base, sizeof header);
  if (header.bytes > staging_->shape().slot_bytes || header.pieces == 0) return false;
  uint32_t at = sizeof header;
  for (uint32_t i = 0; i < header.pieces; i++) {
    PieceHeader piece;
    if (header.bytes - at < sizeof piece) return false;
    std::memcpy(&piece, base + at, sizeof piece);
    at += (uint32_t)sizeof piece;
    if (piece.bytes > header.bytes - at || piece.offset > options_.heap.bytes ||
        piece.bytes > options_.heap.bytes - piece.offset)
      return false;
    memory_->copy_in(piece.offset, base + at, piece.bytes);
    at += padded(piece.bytes);
    if (at > header.bytes) return false;
    stats_.chunks_in.add();
    if (piece.group != kUncounted && !s->in.chunk(piece.group)) return false;
  }
  arrived_.push({memory_->in_position(), s, slot, true});
  return true;
}

void Worker::on_message(const Event& e) {
  if (e.peer < 0 || (size_t)e.peer >= streams_.size() || !streams_[(size_t)e.peer])
    return broken(e.peer, "a message came from a PE that is not served here");
  Stream* s = streams_[(size_t)e.peer].get();
  const char* data = static_cast<const char*>(e.data);
  for (uint64_t at = 0; at < e.bytes;) {
    uint32_t bytes = 0;
    stats_.records_in.add();
    if (!on_record(s, data + at, (uint32_t)(e.bytes - at), &bytes)) {
      // An abort record has said everything already.
      if (!shared_->failed.load(std::memory_order_relaxed))
        broken(s->pe, "record of type " + std::to_string((int)data[at]) + " is malformed or out of its window");
      return;
    }
    at += bytes;
  }
  apply(s);
}

// Handles one record and tells its length. False: it makes no sense.
bool Worker::on_record(Stream* s, const char* record, uint32_t room, uint32_t* bytes) {
  const uint64_t heap = options_.heap.bytes;
  auto inside = [&](uint64_t offset, uint64_t n) { return offset <= heap && n <= heap - offset; };
  auto read = [&](auto* r) {
    if (room < sizeof *r) return false;
    std::memcpy(r, record, sizeof *r);
    *bytes = sizeof *r;
    return true;
  };
  if (room < 8) return false;
  switch ((RecordType)record[0]) {
  case RecordType::mark: {
    MarkRecord m;
    if (!read(&m) || (uint8_t)m.op > (uint8_t)MarkOp::answer) return false;
    if ((m.op == MarkOp::set || m.op == MarkOp::add) && (!inside(m.offset, 8) || m.offset % 8)) return false;
    if (m.op == MarkOp::answer && (m.value >= gets_.size() || !gets_[m.value].queue || gets_[m.value].stream != s))
      return false;
    return s->in.mark(m);
  }
  case RecordType::value: {
    ValueRecord v;
    if (!read(&v) || room - sizeof v < padded(v.bytes) || v.bytes > HeapMemory::kMaxWrite || !inside(v.offset, v.bytes))
      return false;
    *bytes += padded(v.bytes);
    memory_->write(v.offset, record + sizeof v, v.bytes);
    return s->in.chunk(v.group);
  }
  case RecordType::ack: {
    AckRecord a;
    if (!read(&a)) return false;
    s->out.acknowledge(a);
    s->progress++;
    s->refused = false;
    settle(s);
    return true;
  }
  case RecordType::credit: {
    CreditRecord c;
    if (!read(&c) || c.count > kCreditsPerRecord || !staging_) return false;
    for (int i = 0; i < c.count; i++) s->credits.push_back(c.slots[i]);
    s->progress++;
    if (!s->ops.empty()) activate(s);
    return true;
  }
  case RecordType::request: {
    GetRecord g;
    if (!read(&g) || !inside(g.source, g.bytes) || g.bytes == 0 || s->asked.size() >= kMaxAsked || !staging_)
      return false;
    s->asked.push(g);
    serve_asked(s);
    return true;
  }
  case RecordType::abort: {
    AbortRecord a;
    if (!read(&a) || room - sizeof a < a.bytes) return false;
    give_up("PeerLost",
            "PE " + std::to_string(s->pe) + " gave up and said why: " + std::string(record + sizeof a, a.bytes), s->pe,
            "", 0);
    return false;
  }
  }
  return false;
}

// Gets that the peer asked for, as puts into its heap.
void Worker::serve_asked(Stream* s) {
  while (!s->asked.empty() && has_room(*s)) {
    const GetRecord g = s->asked.front();
    s->asked.pop();
    if (s->out.stale()) append_mark(s, s->out.close());
    accept_write(s, Command::put, g.target, g.source, g.bytes, MarkOp::answer, 0, g.id);
  }
  if (!s->asked.empty()) touch(s);
}

void Worker::apply(Stream* s) {
  MarkRecord m;
  while (s->in.next(&m)) {
    if (m.op == MarkOp::set) memory_->set(m.offset, m.value);
    else if (m.op == MarkOp::add) memory_->add(m.offset, m.value);
    else if (m.op == MarkOp::answer) arrived_.push({memory_->in_position(), s, (uint32_t)m.value, false});
    if (m.op == MarkOp::set || m.op == MarkOp::add) stats_.signals_applied.add();
    if (m.flags & kReply) s->reply = true;
  }
  touch(s);
}

// Slots and gets whose data has reached the heap. One reader of the positions serves all streams: they only rise.
void Worker::finish_arrived() {
  const uint64_t completed = memory_->in_completed();
  while (!arrived_.empty() && arrived_.front().position <= completed) {
    const Arrived a = arrived_.front();
    arrived_.pop();
    Stream* s = a.stream;
    if (a.is_slot) {
      s->freed.push_back((uint16_t)a.index);
      touch(s);
      continue;
    }
    s->gets_asked--;
    s->progress++;
    Get& g = gets_[a.index];
    s->epoch(g.epoch).outstanding--;
    finish_get(a.index, g.remaining);
    settle(s);
  }
}

// Acknowledgements and credits: at once where the peer waits, otherwise when a good part of its window is used up.
void Worker::acknowledge() {
  const uint64_t completed = memory_->in_completed();
  for (size_t i = 0; i < touched_.size();) {
    Stream* s = touched_[i];
    if (!s->asked.empty()) serve_asked(s);
    if (!s->ack_pending && (s->reply || s->in.complete_groups() - s->told_groups >= s->in.window().groups / 4 ||
                            s->in.applied_marks() - s->told_marks >= s->in.window().marks / 4)) {
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
      s->outbox.append_record(a);
      s->told_groups = s->ack_groups;
      s->told_marks = s->ack_marks;
      s->ack_pending = false;
      stats_.acks_sent.add();
      if (!s->talking) talking_.push_back(s), s->talking = true;
    }
    while (!s->freed.empty()) {
      CreditRecord c = {};
      c.type = RecordType::credit;
      for (; c.count < kCreditsPerRecord && !s->freed.empty(); s->freed.pop_back())
        c.slots[c.count++] = s->freed.back();
      s->outbox.append_record(c);
      if (!s->talking) talking_.push_back(s), s->talking = true;
    }
    if (s->ack_pending || s->reply || !s->asked.empty()) {
      i++;
      continue;
    }
    s->touched = false;
    touched_[i] = touched_.back();
    touched_.pop_back();
  }
}

} // namespace tsn::proxy
