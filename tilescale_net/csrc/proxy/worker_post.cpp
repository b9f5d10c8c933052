// From the peers to the transport, and completions back.
#include "tilescale_net/csrc/proxy/worker.h"

#include <algorithm>

namespace tsn::proxy {

// The rail with the fewest bytes on the way; equal ones in turn, so that small chunks go round.
int Worker::pick_rail() {
  const auto n = (uint32_t)rails_.size();
  int best = -1;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t r = next_rail_ + i < n ? next_rail_ + i : next_rail_ + i - n;
    if (rails_[r].full || rails_[r].ops >= rail_limit_) continue;
    if (best < 0 || rails_[r].bytes < rails_[(size_t)best].bytes) best = (int)r;
  }
  if (best >= 0) next_rail_ = (uint32_t)best + 1 < n ? (uint32_t)best + 1 : 0;
  return best;
}

Worker::InFlightOp& Worker::begin_op(PeerState* s, Command command, int rail, uint32_t* index) {
  if (free_in_flight_ops_.empty()) {
    free_in_flight_ops_.push_back((uint32_t)in_flight_ops_.size());
    in_flight_ops_.emplace_back();
  }
  *index = free_in_flight_ops_.back();
  free_in_flight_ops_.pop_back();
  InFlightOp& f = in_flight_ops_[*index];
  f.peer = s;
  f.command = command;
  f.rail = rail;
  f.started = stamp_;
  return f;
}

void Worker::commit_op(const InFlightOp& f) {
  Rail& rail = rails_[(size_t)f.rail];
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
  if (proxy_state_->excused(s->pe)) return;
  fail("FabricError",
       std::string(name_of(command)) + " of " + std::to_string(bytes) + " bytes to PE " + std::to_string(s->pe) +
           " at heap offset " + std::to_string(offset) + " was refused: " + transport_->last_error(),
       s->pe, name_of(command), offset);
}

// Posts one chunk of the peer's first operation. False: nothing can be posted now.
bool Worker::post_next(PeerState* s) {
  Op& op = s->ops.front();
  const bool read = op.command == Command::get;
  const bool has_imm = !read && (!options_.trust_last_chunk || op.bytes <= op.chunk);
  if (has_imm && s->immediates_sent - s->immediates_taken >= s->immediate_limit) return false;
  const int rail = pick_rail();
  if (rail < 0) return false;
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
  const Post post = read ? transport_->post_read(copy) : transport_->post_write(copy);
  if (post != Post::ok) {
    f.peer = nullptr;
    free_in_flight_ops_.push_back(index);
    rails_[(size_t)rail].full = true;
    on_post_failed(s, post, op.command, op.remote, f.bytes);
    return false;
  }
  commit_op(f);
  s->own_pieces++;
  s->immediates_sent += has_imm;
  op.local += f.bytes;
  op.remote += f.bytes;
  op.bytes -= f.bytes;
  if (op.bytes == 0) s->ops.pop();
  return true;
}

bool Worker::post_own(PeerState* s) {
  if (staging_) return staging_->fill(s, memory_.get(), options_.trust_last_chunk);
  return s->in_flight < peer_limit_ && post_next(s);
}

// A turn for every peer that has something; peers with nothing left drop out of the list.
bool Worker::post_all() {
  if (active_.empty()) return false;
  const uint64_t start = ticks();
  bool any = false;
  for (size_t i = 0; i < active_.size();) {
    PeerState* s = active_[i];
    for (int n = 0; n < kPostsPerTurn && !s->ops.empty(); n++) {
      if (s->helped ? !post_shared(s) : !post_own(s)) break;
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
  // The first peer of this round is the last of the next, so that none starves when room is short.
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
    const Post post = transport_->post_write(copy);
    if (post != Post::ok) {
      f.peer = nullptr;
      free_in_flight_ops_.push_back(index);
      rails_[(size_t)rail].full = true;
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
      if (post == Post::error && !proxy_state_->excused(s->pe)) return any;
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
  free_in_flight_ops_.push_back(index);
  Rail& rail = rails_[(size_t)f.rail];
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
  if (s->helping) return tell_complete(s, f);
  s->interval(f.interval).outstanding -= f.pieces;
  if (f.command == Command::get) finish_get(f.index, f.bytes);
  if (s->intervals.size() > 1) complete_ready_flushes(s);
}

void Worker::finish_get(uint32_t index, uint64_t bytes) {
  Get& g = gets_[index];
  g.remaining -= bytes;
  stats_.bytes_got.add(bytes);
  if (g.remaining) return;
  if (!staging_) memory_->settle_rdma(); // what the NIC has brought, before a kernel sees the ticket complete
  g.queue->queue->complete(g.position);
  g.queue = nullptr;
  free_gets_.push_back(index);
}

void Worker::failed_event(const Event& event) {
  const InFlightOp* f = event.cookie < in_flight_ops_.size() && in_flight_ops_[event.cookie].peer
                            ? &in_flight_ops_[event.cookie]
                            : nullptr;
  const int pe = f ? f->peer->pe : event.peer;
  if (pe >= 0 && pe < options_.n_pes && proxy_state_->excused(pe)) {
    if (f) on_completion((uint32_t)event.cookie); // no thread waits for its data
    return;
  }
  const std::string operation = f ? name_of(f->command) : "message";
  std::string text = operation + (pe >= 0 ? " to PE " + std::to_string(pe) : "");
  if (f) text += " (" + std::to_string(f->bytes) + " bytes at heap offset " + std::to_string(f->offset) + ")";
  text +=
      " failed: " + std::string(event.text ? event.text : "no reason given") + " (" + std::to_string(event.code) + ")";
  // What a vanished process looks like from here; any other code is a failure of the network.
  const bool gone = fabric::means_gone(event.code);
  if (gone) text += "; PE " + std::to_string(pe) + "'s process seems to be gone: look at that rank's output";
  else text += "; check the link, and the provider's limits and log (FI_LOG_LEVEL=warn)";
  fail(gone ? "PeerLost" : "FabricError", text, pe, operation, f ? f->offset : 0);
}

} // namespace tsn::proxy
