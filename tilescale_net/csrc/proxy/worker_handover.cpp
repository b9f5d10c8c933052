// What the threads of one peer share: chunks go from the home to helpers, their outcome goes back.
#include "tilescale_net/csrc/proxy/worker.h"

#include <algorithm>

namespace tsn::proxy {

// Posts one chunk of the peer's first operation through the thread that has the fewest, this one before others: so a
// put of one chunk goes the way that it would go without helpers. False: no thread takes more now.
bool Worker::post_shared(PeerState* s) {
  Op& op = s->ops.front();
  const uint64_t bytes = std::min(op.bytes, op.chunk);
  if (bytes < options_.shared_bytes) return post_own(s);
  const auto least = (size_t)(std::min_element(s->given.begin(), s->given.end()) - s->given.begin());
  const bool full = s->given[least] >= kMostGiven;
  if (full || s->own_pieces <= s->given[least]) {
    if (post_own(s)) return true;
    if (full) return false;
  }
  Handover h = {Handover::piece, s->pe, (int)least, 1, op};
  h.op.bytes = h.op.chunk = bytes;
  proxy_state_->inboxes[(size_t)thread_of(options_, s->pe, (int)least + 1)]->push(h);
  s->given[least]++;
  stats_.handed_over.add();
  op.local += bytes;
  op.remote += bytes;
  op.bytes -= bytes;
  if (op.bytes == 0) s->ops.pop();
  return true;
}

// To the peer's home: a chunk is in the heap, and what this thread has seen of it is visible there.
void Worker::tell_arrived(PeerState* s, uint32_t group) {
  Handover h = {Handover::arrived, s->pe, 0, 1, {}};
  h.op.group = group;
  proxy_state_->inboxes[(size_t)thread_of(options_, s->pe)]->push(h);
}

// To the peer's home: chunks that it gave are posted and complete.
void Worker::tell_complete(PeerState* s, const InFlightOp& f) {
  const int home = thread_of(options_, s->pe);
  const int helper = (index_ - home + options_.threads) % options_.threads - 1;
  Handover h = {Handover::complete, s->pe, helper, f.pieces, {}};
  h.op.command = f.command;
  h.op.interval = f.interval;
  h.op.get = f.index;
  h.op.bytes = f.bytes;
  proxy_state_->inboxes[(size_t)home]->push(h);
}

// Takes what other threads have left here.
void Worker::take_over() {
  inbox_->take(&handed_);
  for (const Handover& h : handed_) {
    PeerState* s = peers_[(size_t)h.pe].get();
    switch (h.kind) {
    case Handover::piece:
      s->ops.push(h.op);
      activate(s);
      break;
    case Handover::complete:
      s->given[(size_t)h.helper] -= h.pieces;
      s->progress++;
      s->interval(h.op.interval).outstanding -= h.pieces;
      if (h.op.command == Command::get) finish_get(h.op.get, h.op.bytes);
      if (s->intervals.size() > 1) complete_ready_flushes(s);
      break;
    case Handover::arrived:
      if (!s->in.chunk(h.op.group))
        return protocol_error(s->pe, "more data than announced for group " + std::to_string(h.op.group));
      apply(s);
      break;
    }
  }
}

// Whether this thread may end. A thread that shares peers does not end while others can still give it something.
bool Worker::may_end(bool calm) {
  if (!inbox_) return calm;
  if (calm != calm_) {
    calm_ = calm;
    proxy_state_->calm.fetch_add(calm ? 1 : -1, std::memory_order_acq_rel);
  }
  return calm && proxy_state_->calm.load(std::memory_order_acquire) == options_.threads;
}

} // namespace tsn::proxy
