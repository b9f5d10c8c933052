// Flushes: what they wait for, and the tickets that they complete.
#include "tilescale_net/csrc/proxy/worker.h"

namespace tsn::proxy {

bool Worker::enqueue_flush(QueueState* q, const Request& r, uint64_t position) {
  const bool part = r.command == Command::flush_part;
  const bool owns_entry = !part || (q->index == 0 && make_ticket(0, position) == r.value);
  if (owns_entry && q->queue->is_open(position)) return false;
  auto covers = [&](const PeerState& s) {
    return r.pe == kAllPes ? (uint32_t)s.pe % (uint32_t)options_.queues == q->index : (uint32_t)s.pe == r.pe;
  };
  for (auto& s : peers_)
    if (s && covers(*s) && !has_room(*s)) return false;
  stats_.flushes.add();
  if (owns_entry) q->queue->begin(position);
  if (free_flushes_.empty()) {
    free_flushes_.push_back((uint32_t)flushes_.size());
    flushes_.emplace_back();
  }
  const uint32_t index = free_flushes_.back();
  free_flushes_.pop_back();
  flushes_[index] = {q, position, ticks(), 1, part, r.value};
  for (auto& entry : peers_) {
    PeerState* s = entry.get();
    if (!s || !covers(*s)) continue;
    flushes_[index].remaining++;
    Interval& e = s->intervals.back();
    e.closed = true;
    e.flush = index;
    e.has_mark = s->needs_flush_mark;
    if (e.has_mark) {
      e.mark = s->out.next_mark();
      append_mark(s, s->out.flush());
      s->needs_flush_mark = false;
    }
    s->intervals.push(Interval());
    complete_ready_flushes(s);
  }
  finish_flush(index); // its own count, which kept it alive until here
  return true;
}

// Ends the flushes at the head of the peer whose conditions are met.
void Worker::complete_ready_flushes(PeerState* s) {
  while (s->intervals.size() > 1) {
    const Interval& e = s->intervals.front();
    if (e.outstanding || (e.has_mark && s->out.settled_marks() <= e.mark)) return;
    const uint32_t flush = e.flush;
    s->intervals.pop();
    s->first_interval++;
    finish_flush(flush);
  }
}

void Worker::finish_flush(uint32_t index) {
  Flush& f = flushes_[index];
  if (--f.remaining) return;
  stats_.flush.add(ticks() - f.started);
  if (f.part) proxy_state_->flush_part_done(f.ticket);
  else f.queue->queue->complete(f.position);
  free_flushes_.push_back(index);
}

} // namespace tsn::proxy
