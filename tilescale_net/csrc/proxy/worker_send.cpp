// From the queues to the peers: checking and numbering.
#include "tilescale_net/csrc/proxy/worker.h"

namespace tsn::proxy {
namespace {
constexpr uint64_t kLeastStripe = 65536, kPage = 4096;
} // namespace

// Takes queued descriptors, up to a bound so that the rest of the loop gets its turn.
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
           concat("the proxy refused a ", name_of(r.command), " to PE ", r.pe, ": ", why,
                  "; nothing was sent. Symmetric memory comes from tilescale_net.empty or zeros, and sizes are in "
                  "elements"),
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
  auto range = [](uint64_t offset, uint64_t bytes) { return concat(" [", offset, ", ", offset + bytes, ")"); };
  auto inside = [&](uint64_t offset, uint64_t bytes, const char* which) {
    if (bounds_.data(offset, bytes)) return true;
    if (offset >= kMaxOffset) // the device's code for an address outside of the heaps
      return *why = std::string(which) +
                    " is not in symmetric memory, which alone the fabric reaches; make the tensor " +
                    "with tilescale_net.empty or zeros",
             false;
    *why = std::string(which) + range(offset, bytes) +
           (offset < kSystemBytes
                ? concat(" lies in the first ", kSystemBytes, " bytes of the heap, which are the package's own")
                : concat(" lies outside the heap of ", bounds_.bytes, " bytes"));
    return false;
  };
  auto word = [&](uint64_t offset) {
    if (bounds_.word(offset)) return true;
    // A descriptor holds a word's number: one that is not aligned comes as the last number there is.
    if (offset % 8 || offset == (kMaxOffset & ~7ull))
      return *why = "the signal word" + (offset % 8 ? concat(" at offset ", offset) : "") + " is not aligned to 8",
             false;
    return inside(offset, 8, "the signal word");
  };
  const Command c = r.command;
  if (c == Command::none || (uint32_t)c >= kCommandCount)
    return *why = concat("kind ", (uint32_t)c, " is unknown"), false;
  const bool to_all = r.pe == kAllPes && (c == Command::fence || c == Command::flush || c == Command::flush_part);
  if (!to_all && (r.pe >= (uint32_t)options_.n_pes || !peers_[r.pe]))
    return *why = r.pe >= (uint32_t)options_.n_pes ? concat("there are ", options_.n_pes, " PEs")
                                                   : "the PE is not reached through this queue",
           false;
  if (is_value(c)) {
    const uint64_t bytes = value_bytes(c);
    if (!inside(r.first, bytes, "the destination")) return false;
    if (r.first % bytes)
      return *why = concat("a value of ", bytes, " bytes at offset ", r.first, " is not aligned"), false;
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
  const uint64_t rails = rails_.size() * (s.delegated.size() + 1);
  // One put uses all rails, of all threads, as long as chunks are worth their overhead.
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

// `behind`: it waits for the last data that were accepted, and so may travel with them. If they are staged, that spares
// both sides a message.
void Worker::append_mark(PeerState* s, const MarkRecord& mark, bool behind) {
  stats_.records.add();
  s->needs_flush_mark = true;
  if (behind && staging_) {
    if (s->ops.empty() && staging_->append(s, mark)) return;
    if (!s->ops.empty() && !s->ops.back().marked) {
      s->ops.back().marked = true;
      return s->marks.push(mark);
    }
  }
  s->outbox.append_record(mark);
  mark_has_messages(s);
}

// Numbers a write, and its mark if it has one. Unless it travels in a slot with its data, the mark leaves at once,
// usually ahead of the data: the target counts.
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
    s->ops.add() = {command, (uint32_t)group, s->open_interval(), 0, remote, local, bytes, chunk, false};
    s->intervals.back().outstanding += pieces;
    if (!s->confirms) s->needs_flush_mark = true;
    activate(s);
  }
  if (marked) append_mark(s, s->out.signal(op, word, value, group, counted), true);
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
    append_mark(s, s->out.signal(op, r.first, r.value, 0, 0), s->out.fenced());
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
  const uint32_t index = gets_.take();
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
  uint64_t chunk;
  s->intervals.back().outstanding += pieces_of(*s, r.bytes, &chunk);
  s->ops.add() = {Command::get, 0, s->open_interval(), index, r.second, r.first, r.bytes, chunk, false};
  activate(s);
  return true;
}

// From the peers to the transport, and completions back.
// The rail with the fewest bytes in flight; equal ones in turn, so that small chunks spread.
int Worker::pick_rail() {
  const auto n = (uint32_t)rails_.size();
  int best = -1;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t r = next_rail_ + i < n ? next_rail_ + i : next_rail_ + i - n;
    if (rails_[r].full || rails_[r].ops >= rail_limit_) continue;
    if (best < 0 || rails_[r].bytes < rails_[best].bytes) best = (int)r;
  }
  if (best >= 0) next_rail_ = (uint32_t)best + 1 < n ? (uint32_t)best + 1 : 0;
  return best;
}

Worker::InFlightOp& Worker::begin_op(PeerState* s, Command command, int rail, uint32_t* index) {
  *index = in_flight_ops_.take();
  InFlightOp& f = in_flight_ops_[*index];
  f.peer = s;
  f.command = command;
  f.rail = rail;
  f.started = stamp_;
  return f;
}

void Worker::commit_op(const InFlightOp& f) {
  Rail& rail = rails_[f.rail];
  rail.ops++;
  rail.bytes += f.bytes;
  f.peer->in_flight++;
  in_flight_++;
  stats_.chunks.add();
  stats_.in_flight_max.raise(in_flight_);
}

void Worker::on_post_failed(PeerState* s, Post post, Command command, uint64_t offset, uint64_t bytes) {
  if (post == Post::again) {
    s->backpressured = true;
    stats_.retries.add();
    return;
  }
  if (proxy_state_->excluded(s->pe)) return;
  fail("FabricError",
       concat(name_of(command), " of ", bytes, " bytes to PE ", s->pe, " at heap offset ", offset,
              " was refused: ", transport_->last_error()),
       s->pe, name_of(command), offset);
}

// Posts one chunk of the peer's first operation. False: nothing can be posted now. `more`: the caller continues at
// once.
bool Worker::post_next(PeerState* s, bool more) {
  Op& op = s->ops.front();
  const bool read = op.command == Command::get;
  const bool has_imm = !read && (!options_.trust_last_chunk || op.bytes <= op.chunk);
  const uint64_t immediates = s->immediates_sent - s->immediates_taken;
  if (has_imm && immediates >= s->immediate_limit) return false;
  // A doorbell that waits is rung before another rail's turn comes.
  const int rail = unrung_ >= 0 ? unrung_ : pick_rail();
  if (rail < 0 || rails_[rail].full) return false;
  uint32_t index;
  InFlightOp& f = begin_op(s, op.command, rail, &index);
  f.interval = op.interval;
  f.pieces = 1;
  f.index = op.get;
  f.bytes = std::min(op.bytes, op.chunk);
  f.offset = op.remote;
  Transport::Copy copy = {};
  copy.rail = rail;
  copy.peer = s->pe;
  copy.local = heap_region_;
  copy.remote = s->heap;
  copy.local_offset = op.local;
  copy.remote_offset = op.remote;
  copy.bytes = f.bytes;
  copy.cookie = index;
  copy.has_imm = has_imm;
  copy.imm = (uint32_t)options_.rank << group_bits_ | (op.group & ((1u << group_bits_) - 1));
  // The doorbell waits for a chunk that only the network can delay; a delayed chunk is posted again.
  copy.more = more && properties_.doorbells && f.bytes <= kMostUnrung && (op.bytes > f.bytes || s->ops.size() > 1) &&
              immediates + 1 < s->immediate_limit && s->in_flight + 1 < peer_limit_ &&
              rails_[rail].ops + 1 < rail_limit_;
  const Post post = read ? transport_->post_read(copy) : transport_->post_write(copy);
  if (post != Post::ok) {
    f.peer = nullptr;
    in_flight_ops_.release(index);
    rails_[rail].full = true;
    on_post_failed(s, post, op.command, op.remote, f.bytes);
    return false;
  }
  commit_op(f);
  unrung_ = copy.more ? rail : -1;
  if (copy.more) stats_.unrung.add();
  s->own_pieces++;
  s->immediates_sent += has_imm;
  op.local += f.bytes;
  op.remote += f.bytes;
  op.bytes -= f.bytes;
  if (op.bytes == 0) s->ops.pop();
  return true;
}

bool Worker::post_own(PeerState* s, bool more) {
  if (staging_) return staging_->fill(s, memory_.get(), options_.trust_last_chunk);
  return s->in_flight < peer_limit_ && post_next(s, more);
}

// A turn for every peer that has something; peers with nothing left drop out of the list.
bool Worker::post_all() {
  if (active_.empty()) return false;
  const uint64_t start = ticks();
  bool any = false;
  for (size_t i = 0; i < active_.size();) {
    PeerState* s = active_[i];
    for (int n = 0; n < kPostsPerTurn && !s->ops.empty(); n++) {
      if (s->shared ? !post_shared(s) : !post_own(s, n + 1 < kPostsPerTurn)) break;
      any = true;
    }
    if (!s->ops.empty()) {
      i++;
      continue;
    }
    s->active = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
  // The first peer of this round is the last of the next, so that none starves.
  if (active_.size() > 1) std::rotate(active_.begin(), active_.begin() + 1, active_.end());
  if (any) stats_.post.add(ticks() - start);
  return any;
}

// Writes the staging slots that are full.
bool Worker::post_slots() {
  bool any = false;
  while (Staging::SendSlot* slot = staging_->ready(*memory_)) {
    PeerState* s = slot->peer;
    const int rail = pick_rail();
    if (rail < 0) break;
    uint32_t index;
    InFlightOp& f = begin_op(s, Command::put, rail, &index);
    f.interval = slot->interval;
    f.pieces = slot->pieces;
    f.index = slot->index;
    f.bytes = slot->bytes;
    f.offset = 0;
    Transport::Copy copy = {};
    copy.rail = rail;
    copy.peer = s->pe;
    copy.local = send_region_;
    copy.remote = s->staging;
    copy.local_offset = (uint64_t)slot->index * staging_->shape().slot_bytes;
    copy.remote_offset = (s->first_slot + slot->remote) * s->their_slot_bytes;
    copy.bytes = slot->bytes;
    copy.cookie = index;
    copy.has_imm = true;
    copy.imm = (uint32_t)options_.rank << group_bits_ | slot->remote;
    copy.source_only = true; // credits and marks tell what has arrived: the network need not answer each slot, too
    const Post post = transport_->post_write(copy);
    if (post != Post::ok) {
      f.peer = nullptr;
      in_flight_ops_.release(index);
      rails_[rail].full = true;
      on_post_failed(s, post, Command::put, 0, slot->bytes);
      break;
    }
    commit_op(f);
    if (trace_) trace_->staged(s->pe, slot->bytes, slot->begun);
    staging_->pop_ready();
    any = true;
  }
  return any;
}

bool Worker::post_messages() {
  bool any = false;
  for (size_t i = 0; i < with_messages_.size();) {
    PeerState* s = with_messages_[i];
    const uint64_t before = stats_.messages.get();
    const int rail = (int)((size_t)s->pe % rails_.size());
    const Post post = s->outbox.flush(transport_.get(), rail, s->pe, &stats_);
    if (stats_.messages.get() != before) {
      s->progress++, any = true;
      if (trace_) trace_->message(s->pe);
    }
    if (post != Post::ok) {
      on_post_failed(s, post, Command::put_signal_set, 0, 0);
      if (post == Post::error && !proxy_state_->excluded(s->pe)) return any;
      i++;
      continue;
    }
    s->has_messages = false;
    with_messages_[i] = with_messages_.back();
    with_messages_.pop_back();
  }
  return any;
}

void Worker::on_completion(uint32_t index) {
  InFlightOp& f = in_flight_ops_[index]; // nothing below launches another one
  PeerState* s = f.peer;
  f.peer = nullptr;
  in_flight_ops_.release(index);
  Rail& rail = rails_[f.rail];
  rail.ops--;
  rail.bytes -= f.bytes;
  s->in_flight--;
  s->own_pieces -= f.pieces;
  in_flight_--;
  s->progress++;
  s->backpressured = false;
  stats_.completion.add(stamp_ - f.started);
  if (trace_) trace_->transfer(f.command, s->pe, f.bytes, f.started, index);
  if (f.command != Command::get && staging_) staging_->release(f.index);
  if (s->owned_elsewhere) return notify_completion(s, f);
  s->settle(f.interval, f.pieces);
  if (f.command == Command::get) finish_get(f.index, f.bytes);
  if (s->intervals.size() > 1) complete_ready_flushes(s);
}

void Worker::finish_get(uint32_t index, uint64_t bytes) {
  Get& g = gets_[index];
  g.remaining -= bytes;
  stats_.bytes_got.add(bytes);
  if (g.remaining) return;
  if (!staging_) memory_->settle_rdma(); // make the NIC's writes visible before a kernel sees the ticket complete
  g.queue->queue->complete(g.position);
  g.queue = nullptr;
  gets_.release(index);
}

void Worker::failed_event(const Event& event) {
  const InFlightOp* f = event.cookie < in_flight_ops_.size() && in_flight_ops_[event.cookie].peer
                            ? &in_flight_ops_[event.cookie]
                            : nullptr;
  const int pe = f ? f->peer->pe : event.peer;
  if (pe >= 0 && pe < options_.n_pes && proxy_state_->excluded(pe)) {
    if (f) on_completion((uint32_t)event.cookie); // no thread waits for its data
    return;
  }
  // The code of a vanished process; any other code is a failure of the network.
  const bool gone = fabric::is_peer_lost(event.code);
  // Without a PE it may be of an excluded one; if not, deadlines and the watchdog find out.
  if (pe < 0 && gone && proxy_state_->any_excluded()) {
    nameless_++;
    return;
  }
  const std::string operation = f ? name_of(f->command) : "message";
  std::string text = operation + (pe >= 0 ? concat(" to PE ", pe) : "");
  if (f) text += concat(" (", f->bytes, " bytes at heap offset ", f->offset, ")");
  text += concat(" failed: ", event.text ? event.text : "no reason given", " (", event.code, ")");
  if (gone)
    text += pe < 0 ? "; the process of a PE that the network does not name seems to be gone: look at the ranks' output"
                   : concat("; PE ", pe, "'s process seems to be gone: look at that rank's output");
  else text += "; check the link, and the provider's limits and log (FI_LOG_LEVEL=warn)";
  fail(gone ? "PeerLost" : "FabricError", text, pe, operation, f ? f->offset : 0);
}

} // namespace tsn::proxy
