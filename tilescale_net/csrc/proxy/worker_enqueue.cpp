// From the queues to the peers: checking and numbering.
#include "tilescale_net/csrc/proxy/worker.h"

#include <algorithm>

namespace tsn::proxy {
namespace {
constexpr uint64_t kLeastStripe = 65536, kPage = 4096;
} // namespace

// Takes what the queue holds, up to a bound so that the rest of the loop gets its turn.
bool Worker::drain_queue(QueueState* q) {
  if (q->held) {
    if (!enqueue(q, q->request, q->position)) return false;
    if (trace_) trace_->entry(q->request);
    q->held = false;
  }
  HostQueue& host = q->queue->host;
  Request r;
  uint64_t position = host.position();
  if (!host.pop(&r)) {
    host.publish();
    return false;
  }
  const uint64_t start = ticks(), first = position;
  std::string why;
  for (;;) {
    if (!valid(r, &why)) {
      fail("InvalidDescriptor",
           "the proxy refused a " + std::string(name_of(r.command)) + " to PE " + std::to_string(r.pe) + ": " + why +
               "; nothing was sent. Symmetric memory comes from tilescale_net.empty or zeros, and sizes are in "
               "elements",
           (int)r.pe, name_of(r.command), r.first);
      return false;
    }
    if (!enqueue(q, r, position)) {
      q->held = true;
      q->request = r;
      q->position = position;
      stats_.held.add();
      position++;
      break;
    }
    if (trace_) trace_->entry(r);
    position++;
    if (position - first >= kPopsPerVisit || !host.pop(&r)) break;
  }
  host.publish();
  stats_.queue_depth_max.raise(position - first);
  stats_.pop.add(ticks() - start);
  return true;
}

bool Worker::valid(const Request& r, std::string* why) const {
  auto range = [](uint64_t offset, uint64_t bytes) {
    return " [" + std::to_string(offset) + ", " + std::to_string(offset + bytes) + ")";
  };
  auto inside = [&](uint64_t offset, uint64_t bytes, const char* which) {
    if (bounds_.data(offset, bytes)) return true;
    if (offset >= kMaxOffset) // what the device writes for an address that is in no heap
      return *why = std::string(which) +
                    " is not in symmetric memory, which alone the fabric reaches; make the tensor " +
                    "with tilescale_net.empty or zeros",
             false;
    *why = std::string(which) + range(offset, bytes) +
           (offset < kSystemBytes ? " lies in the first " + std::to_string(kSystemBytes) +
                                        " bytes of the heap, which "
                                        "are the package's own"
                                  : " lies outside the heap of " + std::to_string(bounds_.bytes) + " bytes");
    return false;
  };
  auto word = [&](uint64_t offset) {
    if (bounds_.word(offset)) return true;
    // A descriptor holds a word's number: one that is not aligned comes as the last number there is.
    if (offset % 8 || offset == (kMaxOffset & ~7ull))
      return *why = "the signal word" + (offset % 8 ? " at offset " + std::to_string(offset) : "") +
                    " is not aligned to 8",
             false;
    return inside(offset, 8, "the signal word");
  };
  const Command c = r.command;
  if (c == Command::none || (uint32_t)c >= kCommandCount)
    return *why = "kind " + std::to_string((uint32_t)c) + " is unknown", false;
  const bool to_all = r.pe == kAllPes && (c == Command::fence || c == Command::flush || c == Command::flush_part);
  if (!to_all && (r.pe >= (uint32_t)options_.n_pes || !peers_[r.pe]))
    return *why = r.pe >= (uint32_t)options_.n_pes ? "there are " + std::to_string(options_.n_pes) + " PEs"
                                                   : "the PE is not reached through this queue",
           false;
  if (is_value(c)) {
    const uint64_t bytes = value_bytes(c);
    if (!inside(r.first, bytes, "the destination")) return false;
    if (r.first % bytes)
      return *why = "a value of " + std::to_string(bytes) + " bytes at offset " + std::to_string(r.first) +
                    " is not aligned",
             false;
    return !is_value_signal(c) || word(r.signal);
  }
  switch (c) {
  case Command::put:
  case Command::get:
    return inside(r.first, r.bytes, "the destination") && inside(r.second, r.bytes, "the source");
  case Command::put_signal_set:
  case Command::put_signal_add:
    return inside(r.first, r.bytes, "the destination") && inside(r.second, r.bytes, "the source") && word(r.signal);
  case Command::signal_set:
  case Command::signal_add:
    return word(r.first);
  case Command::flush_part:
    if (ticket_queue(r.value) != 0) return *why = "it is a part of no ticket", false;
    return true;
  default:
    return true;
  }
}

uint64_t Worker::pieces_of(const PeerState& s, uint64_t bytes, uint64_t* chunk) const {
  uint64_t size = s.chunk;
  *chunk = size;
  if (bytes <= std::min(size, kLeastStripe)) return 1;
  const uint64_t rails = rails_.size() * (s.given.size() + 1);
  // One put uses all rails, of all threads, as long as the chunks stay worth their overhead.
  if (rails > 1 && bytes > kLeastStripe)
    size = std::min(size, std::max(kLeastStripe, ((bytes + rails - 1) / rails + kPage - 1) & ~(kPage - 1)));
  *chunk = size;
  return (bytes + size - 1) / size;
}

void Worker::activate(PeerState* s) {
  if (s->active) return;
  s->active = true;
  active_.push_back(s);
}

void Worker::append_value(PeerState* s, uint64_t offset, const void* data, uint32_t bytes, uint64_t group) {
  ValueRecord v = {};
  v.type = RecordType::value;
  v.bytes = (uint16_t)bytes;
  v.group = (uint32_t)group;
  v.offset = offset;
  char* place = s->outbox.append((uint32_t)sizeof v + padded(bytes));
  std::memcpy(place, &v, sizeof v);
  std::memcpy(place + sizeof v, data, bytes);
  stats_.records.add();
  s->needs_flush_mark = true;
  mark_has_messages(s);
}

void Worker::append_mark(PeerState* s, const MarkRecord& mark) {
  s->outbox.append_record(mark);
  stats_.records.add();
  s->needs_flush_mark = true;
  mark_has_messages(s);
}

// Numbers a write, and its mark if it has one. The mark leaves at once, usually ahead of the data: the target counts.
void Worker::enqueue_write(PeerState* s, Command command, uint64_t remote, uint64_t local, uint64_t bytes, MarkOp op,
                           uint64_t word, uint64_t value) {
  uint64_t chunk;
  const uint64_t pieces = pieces_of(*s, bytes, &chunk);
  const uint32_t counted = options_.trust_last_chunk ? 1 : (uint32_t)pieces;
  const bool marked = op != MarkOp::none;
  const uint64_t group = marked ? s->out.own(counted) : s->out.plain(counted);
  if (bytes <= inline_bytes_) {
    append_value(s, remote, memory_->host() + local, (uint32_t)bytes, group);
    stats_.inlined.add();
  } else {
    Op& o = s->ops.add();
    o.command = command;
    o.group = (uint32_t)group;
    o.interval = s->open_interval();
    o.remote = remote;
    o.local = local;
    o.bytes = bytes;
    o.chunk = chunk;
    s->intervals.back().outstanding += pieces;
    if (!s->confirms) s->needs_flush_mark = true;
    activate(s);
  }
  if (marked) append_mark(s, s->out.signal(op, word, value, group, counted));
}

bool Worker::enqueue(QueueState* q, const Request& r, uint64_t position) {
  if (r.command == Command::fence) {
    stats_.fences.add();
    if (r.pe != kAllPes) return peers_[r.pe]->out.fence(), true;
    for (auto& s : peers_)
      if (s && (uint32_t)s->pe % (uint32_t)options_.queues == q->index) s->out.fence();
    return true;
  }
  if (r.command == Command::flush || r.command == Command::flush_part) return enqueue_flush(q, r, position);
  PeerState* s = peers_[r.pe].get();
  if (!has_room(*s)) return false;
  if (s->out.stale()) append_mark(s, s->out.close());
  const MarkOp op = adds(r.command) ? MarkOp::add : MarkOp::set;
  switch (r.command) {
  case Command::get:
    return enqueue_get(q, s, r, position);
  case Command::put:
    stats_.puts.add();
    stats_.bytes_put.add(r.bytes);
    if (r.bytes) enqueue_write(s, r.command, r.first, r.second, r.bytes, MarkOp::none, 0, 0);
    return true;
  case Command::put_signal_set:
  case Command::put_signal_add:
    stats_.put_signals.add();
    stats_.bytes_put.add(r.bytes);
    if (r.bytes) enqueue_write(s, r.command, r.first, r.second, r.bytes, op, r.signal, r.value);
    else append_mark(s, s->out.signal(op, r.signal, r.value, 0, 0));
    return true;
  case Command::signal_set:
  case Command::signal_add:
    stats_.signals.add();
    append_mark(s, s->out.signal(op, r.first, r.value, 0, 0));
    return true;
  default: { // the data came with the descriptor
    const uint32_t bytes = value_bytes(r.command);
    const bool marked = is_value_signal(r.command);
    (marked ? stats_.put_signals : stats_.put_values).add();
    stats_.bytes_put.add(bytes);
    const uint64_t group = marked ? s->out.own(1) : s->out.plain(1);
    append_value(s, r.first, &r.data, bytes, group);
    if (marked) append_mark(s, s->out.signal(op, r.signal, r.value, group, 1));
    return true;
  }
  }
}

bool Worker::enqueue_get(QueueState* q, PeerState* s, const Request& r, uint64_t position) {
  if (q->queue->is_open(position) || (staging_ && s->pending_gets >= kMaxGetRequests)) return false;
  stats_.gets.add();
  if (r.bytes == 0) return q->queue->complete(position), true;
  q->queue->begin(position);
  if (free_gets_.empty()) {
    free_gets_.push_back((uint32_t)gets_.size());
    gets_.emplace_back();
  }
  const uint32_t index = free_gets_.back();
  free_gets_.pop_back();
  gets_[index] = {q, s, position, r.bytes, s->open_interval()};
  if (staging_) {
    s->intervals.back().outstanding++;
    s->pending_gets++;
    GetRecord g = {};
    g.type = RecordType::request;
    g.id = index;
    g.source = r.second;
    g.target = r.first;
    g.bytes = r.bytes;
    s->outbox.append_record(g);
    stats_.records.add();
    mark_has_messages(s);
    return true;
  }
  Op& o = s->ops.add();
  o.command = Command::get;
  o.interval = s->open_interval();
  o.get = index;
  o.remote = r.second;
  o.local = r.first;
  o.bytes = r.bytes;
  s->intervals.back().outstanding += pieces_of(*s, r.bytes, &o.chunk);
  activate(s);
  return true;
}

} // namespace tsn::proxy
