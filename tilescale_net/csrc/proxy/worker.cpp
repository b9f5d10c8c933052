#include "tilescale_net/csrc/proxy/worker.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include <sched.h>

namespace tsn::proxy {
namespace {

constexpr uint32_t kAddressMagic = 0x74736e31;
constexpr uint32_t kLeastImmediates = 4; // that a peer may send before a report

int bits_for(int n) {
  int bits = 0;
  while ((1 << bits) < n) bits++;
  return bits;
}

// The PEs of a list, as runs of equal steps: so the list of all other ranks has the same length for any number of
// ranks.
void write_positions(BlobWriter* w, const std::vector<int>& pes) {
  struct Run {
    int first, step, count;
  };
  std::vector<Run> runs;
  for (const int pe : pes) {
    Run* last = runs.empty() ? nullptr : &runs.back();
    if (last && last->count == 1 && pe > last->first) last->step = pe - last->first;
    if (last && pe == last->first + last->step * last->count) last->count++;
    else runs.push_back({pe, 1, 1});
  }
  w->number(runs.size());
  for (const Run& run : runs)
    for (const int number : {run.first, run.step, run.count}) w->number((uint64_t)number);
}

// The position of `pe` in a list, counted from 1; 0 if it is not listed. Throws FabricError for data that
// write_positions() has not written.
uint64_t read_position(BlobReader* r, uint64_t n_pes, uint64_t pe, const std::string& whose) {
  const auto bounded = [&](const char* what, uint64_t least, uint64_t most) {
    const uint64_t number = r->number();
    if (number >= least && number <= most) return number;
    throw FabricError(
        concat(whose, " is damaged: ", number, " ", what, ", where ", least, " to ", most, " are possible"));
  };
  uint64_t position = 0, before = 0;
  for (uint64_t runs = bounded("runs of PEs", 0, n_pes); runs > 0; runs--) {
    const uint64_t first = bounded("as first PE of a run", 0, n_pes - 1), step = bounded("as step of a run", 1, n_pes);
    const uint64_t count = bounded("PEs in a run", 1, (n_pes - 1 - first) / step + 1);
    const bool here = pe >= first && (pe - first) % step == 0 && (pe - first) / step < count;
    if (here) position = before + (pe - first) / step + 1;
    before += count;
  }
  if (position <= n_pes) return position;
  throw FabricError(concat(whose, " is damaged: it lists more than ", n_pes, " PEs"));
}

} // namespace

Worker::Worker(ProxyState* proxy_state, int index, std::unique_ptr<Transport> transport)
    : proxy_state_(proxy_state), options_(proxy_state->options), index_(index), transport_(std::move(transport)),
      properties_(transport_->properties()), peers_((size_t)options_.n_pes), peer_index_((size_t)options_.n_pes, -1),
      inbox_(proxy_state->inboxes.empty() ? nullptr : proxy_state->inboxes[index].get()), bounds_{options_.heap.bytes},
      events_(128) {
  if ((size_t)index < options_.trace.size()) trace_ = std::make_unique<WorkerTrace>(options_.trace[index]);
  const Properties& p = transport_->properties();
  group_bits_ = std::min(p.imm_bits, 32) - bits_for(options_.n_pes);
  if (group_bits_ < 2)
    throw FabricError(concat("rank ", options_.rank, ": immediates of ", p.imm_bits, " bits are too narrow for ",
                             options_.n_pes, " PEs; at least two bits more than the PEs need must be left"));
  OrderWindow window = options_.window;
  const bool cuda = options_.heap.kind == Memory::cuda;
  const auto visibility = cuda ? cuda::rdma_visibility(options_.heap.device) : cuda::RdmaVisibility::in_order;
  flushes_rdma_ = visibility == cuda::RdmaVisibility::by_flush;
  const bool stage =
      options_.force_staging || (cuda && (!p.device_memory || visibility == cuda::RdmaVisibility::never));
  if (!stage) window.groups = std::min(window.groups, 1u << std::min(group_bits_, 16));
  int peers = 0;
  for (int pe : options_.peers) {
    const int number = (index_ - thread_of(options_, pe) + options_.threads) % options_.threads;
    if (number >= options_.peer_threads) continue;
    auto& s = peers_[pe];
    s = std::make_unique<PeerState>(pe, window, number > 0);
    s->shared = !s->owned_elsewhere && options_.peer_threads > 1 && !options_.trust_last_chunk;
    if (s->shared) s->delegated.resize((size_t)options_.peer_threads - 1);
    s->outbox.set_limit(p.max_message);
    peer_index_[pe] = peers++;
  }
  for (uint32_t q = 0; q < proxy_state->queues.size(); q++) {
    if ((int)q % options_.threads != index_) continue;
    QueueState state = {};
    state.queue = proxy_state->queues[q].get();
    state.index = q;
    queues_.push_back(state);
  }
  chunk_ = std::min(options_.chunk_bytes, p.max_write);
  staged_ = stage;
  // All peers together must fit into the completion queue of one rail.
  immediate_limit_ = p.immediates / (uint32_t)std::max(peers, 1);
  if (immediate_limit_ < kLeastImmediates)
    throw FabricError(concat("rank ", options_.rank, ": the network's completion queue has room for ", p.immediates,
                             " immediates, too few for ", peers, " PEs, which need ", kLeastImmediates,
                             " each; spread the PEs over more threads (TSN_PROXY_QUEUES and TSN_PROXY_THREADS)"));
  if (stage) {
    const StagingShape shape = staging_shape(options_, peers, group_bits_, p.max_write, immediate_limit_);
    staging_ = std::make_unique<Staging>(shape, peers, cuda);
    for (auto& s : peers_)
      if (s) s->slot_full.resize(shape.slots_per_peer);
    chunk_ = std::min<uint64_t>(chunk_, staging_->piece_bytes());
    send_region_ = transport_->register_memory({staging_->send.data(), staging_->send.bytes(), Memory::host, 0});
    receive_region_ =
        transport_->register_memory({staging_->receive.data(), staging_->receive.bytes(), Memory::host, 0});
  } else {
    heap_region_ = transport_->register_memory(options_.heap);
    const uint32_t payload = (p.max_message - (uint32_t)sizeof(ValueRecord)) & ~7u;
    if (!cuda) inline_bytes_ = std::min({options_.inline_bytes, HeapMemory::kMaxWrite, payload});
  }
  confirms_ = !stage && p.delivery_complete;
  rails_.resize((size_t)p.rails);
  // Some room is kept for messages, which let the other side make progress.
  rail_limit_ = std::max(1u, p.depth - std::max(1u, p.depth / 8));
  peer_limit_ = std::max(1u, peers > 1 ? rail_limit_ * (uint32_t)p.rails / 2 : rail_limit_ * (uint32_t)p.rails);
}

Worker::~Worker() { close(); }

// Endpoints that could not be closed, with their registered memory.
struct Worker::Abandoned {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Staging> staging;
};

void Worker::close() {
  if (!transport_) return;
  // A provider with its own threads would still write into the heap, which will be unmapped.
  if (may_close_ || !properties_.remote_progress) {
    transport_.reset(); // before the memory that is registered with it
    staging_.reset();
    return;
  }
  transport_->abandon();
  // A NIC's late writes must not land in the heap's next contents.
  if (heap_region_ >= 0) transport_->release_memory(heap_region_);
  static std::mutex mutex;
  static auto* abandoned = new std::vector<Abandoned>; // never freed
  std::lock_guard<std::mutex> lock(mutex);
  abandoned->push_back({std::move(transport_), std::move(staging_)});
}

std::string Worker::address() const {
  BlobWriter w(kAddressMagic);
  w.text(transport_->address());
  w.number((uint64_t)group_bits_);
  w.number(staging_ != nullptr);
  w.number(flushes_rdma_);
  w.text(staging_ ? transport_->region_key(receive_region_) : transport_->region_key(heap_region_));
  w.number(staging_ ? staging_->shape().slot_bytes : 0);
  w.number(staging_ ? staging_->shape().slots_per_peer : 0);
  std::vector<int> served(
      (size_t)std::count_if(peers_.begin(), peers_.end(), [](const auto& s) { return s != nullptr; }));
  for (int pe = 0; pe < options_.n_pes; pe++)
    if (peer_index_[pe] >= 0) served[(size_t)peer_index_[pe]] = pe;
  write_positions(&w, served);
  w.number(immediate_limit_);
  return w.take();
}

void Worker::connect(int peer, const std::string& address) {
  PeerState* s = peers_[peer].get();
  const std::string us = concat("rank ", options_.rank), them = concat("rank ", peer);
  BlobReader r(address, kAddressMagic, us + ": the proxy address of " + them);
  transport_->connect(peer, r.text());
  const uint64_t bits = r.number();
  const bool staged = r.number() != 0;
  const bool flushes = r.number() != 0;
  s->confirms = confirms_ && !flushes;
  if (bits != (uint64_t)group_bits_ || staged != (staging_ != nullptr))
    throw FabricError(concat(us, " has immediates with ", group_bits_, " free bits and ",
                             staging_ ? "staging" : "no staging", ", ", them, " has ", bits, " and ",
                             staged ? "staging" : "no staging",
                             "; start all ranks with the same provider and options"));
  const RemoteRegion region = transport_->add_remote(peer, r.text());
  (staged ? s->staging : s->heap) = region;
  s->chunk = chunk_;
  const uint64_t slot_bytes = r.number();
  const uint64_t slots = r.number();
  const uint64_t mine =
      read_position(&r, (uint64_t)options_.n_pes, (uint64_t)options_.rank, us + ": the proxy address of " + them);
  if (mine == 0) throw FabricError(them + " does not serve " + us + ": do all ranks see the same topology?");
  s->immediate_limit = r.number();
  if (s->immediate_limit < 1 || s->immediate_limit > UINT32_MAX)
    throw FabricError(
        concat(us, ": ", them, " takes ", s->immediate_limit, " immediates at a time; 1 to 4294967295 are possible"));
  if (!staged) return;
  if (slot_bytes < kLeastSlot || slot_bytes > UINT32_MAX)
    throw FabricError(
        concat(us, ": ", them, " has staging slots of ", slot_bytes, " bytes; ", kLeastSlot, " to 4 GiB are possible"));
  if (slots < 1 || slots > most_slots(group_bits_))
    throw FabricError(
        concat(us, ": ", them, " has ", slots, " staging slots for it; immediates can name ", most_slots(group_bits_)));
  s->their_slot_bytes = (uint32_t)slot_bytes;
  s->slot_bytes = std::min(s->their_slot_bytes, staging_->shape().slot_bytes);
  s->chunk = std::min<uint64_t>(chunk_, s->slot_bytes - kSlotOverhead);
  s->first_slot = (mine - 1) * slots;
  s->their_slots = (uint32_t)slots;
  s->has_credit.assign(slots, 1);
  for (uint64_t i = slots; i > 0; i--) s->credits.push_back((uint16_t)(i - 1));
}

uint64_t Worker::window_bytes() const {
  uint64_t bytes = 0;
  for (const auto& s : peers_)
    if (s) bytes += s->out.bytes() + s->in.bytes();
  return bytes;
}

void Worker::fail(const std::string& kind, const std::string& text, int pe, const std::string& operation,
                  uint64_t offset) {
  Failure f;
  f.kind = kind;
  f.text = concat("rank ", options_.rank, ": ", text);
  f.pe = pe;
  f.operation = operation;
  f.offset = offset;
  proxy_state_->fail(std::move(f));
}

// No work, now or later, without new descriptors.
bool Worker::idle() {
  if (inbox_ && !inbox_->empty()) return false;
  if (in_flight_ || !arrived_.empty() || !active_.empty() || (staging_ && staging_->busy())) return false;
  for (QueueState& q : queues_)
    if (q.held || q.queue->host.peek() != Command::none) return false;
  for (auto& s : peers_)
    if (s && !proxy_state_->excluded(s->pe) &&
        (!s->outbox.empty() || s->intervals.size() > 1 || s->ack_pending || s->reply || !s->get_requests.empty() ||
         s->pending_gets || s->given_pieces()))
      return false;
  return memory_->in_completed() == memory_->in_position();
}

// Requests confirmation of everything sent from every peer, and records when it is complete.
void Worker::drain() {
  const uint64_t wanted = proxy_state_->drains.load(std::memory_order_acquire);
  if (wanted == drained_.load(std::memory_order_relaxed)) return;
  bool settled = true;
  for (auto& s : peers_) {
    if (!s || !s->out.unsettled() || proxy_state_->excluded(s->pe)) continue;
    settled = false;
    // Data sent since the last mark, by descriptors still queued then, need another mark.
    if (s->drained_up_to == s->out.issued() || !has_room(*s)) continue;
    append_mark(s.get(), s->out.flush(), true);
    s->drained_up_to = s->out.issued();
  }
  if (settled && idle() && transport_->idle()) drained_.store(wanted, std::memory_order_release);
}

// See Proxy::apply_adds().
void Worker::apply_adds() {
  const uint64_t wanted = proxy_state_->settles.load(std::memory_order_acquire);
  if (wanted == applied_adds_.load(std::memory_order_relaxed)) return;
  memory_->apply_adds();
  applied_adds_.store(wanted, std::memory_order_release);
}

// Deadlines, now and then.
void Worker::check_timeouts(uint64_t now) {
  const auto limit = (uint64_t)(options_.timeout * 1e9);
  const bool draining =
      proxy_state_->drains.load(std::memory_order_acquire) != drained_.load(std::memory_order_relaxed);
  for (auto& entry : peers_) {
    PeerState* s = entry.get();
    if (!s || proxy_state_->excluded(s->pe)) continue;
    const bool waits = s->in_flight || s->given_pieces() || !s->ops.empty() || s->intervals.size() > 1 ||
                       !s->outbox.empty() || s->pending_gets || (draining && s->out.unsettled());
    if (!waits || s->progress != s->progress_seen || s->waiting_since == 0) {
      s->progress_seen = s->progress;
      s->waiting_since = now;
      continue;
    }
    if (now - s->waiting_since <= limit) continue;
    const std::string seconds = std::to_string(options_.timeout).substr(0, 5);
    const bool op = !s->ops.empty();
    const std::string what = op ? name_of(s->ops.front().command) : "operation";
    if (s->backpressured)
      fail("FabricError",
           concat("the network took nothing for PE ", s->pe, " for ", seconds,
                  " s: every post was answered with \"try again\" (", s->in_flight,
                  " operations are out); check the link and that the PE's process is alive"),
           s->pe, what, op ? s->ops.front().remote : 0);
    else
      fail(
          "PeerLost",
          concat("PE ", s->pe, " has shown no sign of life for ", seconds, " s while ",
                 s->in_flight + s->given_pieces() + s->pending_gets, " operations and ",
                 s->intervals.size() - 1 + (draining && s->out.unsettled()),
                 " flushes wait for it; look at that rank's output, or raise TSN_TIMEOUT if it is only slow",
                 internal_failure_.empty() ? "" : " (a packet of the network's own failed: " + internal_failure_ + ")"),
          s->pe, what, op ? s->ops.front().remote : 0);
    return;
  }
}

// Sends the reason to the peers if possible, so that they need not wait for their deadlines.
void Worker::notify_abort() {
  // The reason of an abort may follow the abort word. Without one the record is empty: another rank's is better.
  const uint64_t deadline = now_ns() + 300000000;
  while (proxy_state_->reason().empty() && now_ns() < deadline &&
         !proxy_state_->stopping.load(std::memory_order_acquire))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Failure failure;
  if (!proxy_state_->failure(&failure)) failure.text = proxy_state_->reason();
  char record[256] = {};
  AbortRecord header = {};
  header.type = RecordType::abort;
  const uint32_t limit = std::min<uint32_t>(sizeof record, transport_->properties().max_message) & ~7u;
  header.bytes = (uint16_t)std::min<size_t>(failure.text.size(), limit - sizeof header);
  std::memcpy(record, &header, sizeof header);
  std::memcpy(record + sizeof header, failure.text.data(), header.bytes);
  const uint32_t bytes = (uint32_t)sizeof header + padded(header.bytes);
  std::vector<int> left;
  for (auto& s : peers_)
    if (s && (failure.kind != "PeerLost" || s->pe != failure.pe)) left.push_back(s->pe);
  const uint64_t end = now_ns() + 100000000;
  for (int quiet = 0; quiet < 1000 && now_ns() < end; quiet += left.empty()) {
    for (size_t i = 0; i < left.size();)
      if (transport_->post_message(0, left[i], record, bytes, kSilent) == Post::again) i++;
      else left.erase(left.begin() + (long)i);
    transport_->poll(events_.data(), (int)events_.size());
  }
}

void Worker::run() try {
  may_close_ = false;
  memory_ = options_.heap.kind == Memory::cuda
                ? make_cuda_memory(reinterpret_cast<uint64_t>(options_.heap.base), options_.heap.device, index_)
            : options_.defers_adds ? make_host_memory_with_mailbox(options_.heap.base, index_)
                                   : make_host_memory(options_.heap.base);
  uint64_t rounds = 0, idle_rounds = 0, stop_at = 0;
  while (!proxy_state_->aborted()) {
    bool busy = false;
    stamp_ = ticks();
    if (inbox_ && !inbox_->empty()) drain_inbox(), busy = true;
    for (QueueState& q : queues_) busy |= drain_queue(&q);
    // All that can leave leaves before the network is polled, which takes as long as a system call.
    busy |= post_all();
    memory_->poll();
    if (staging_) busy |= post_slots();
    if (!with_messages_.empty()) busy |= post_messages();
    busy |= poll_transport();
    memory_->poll();
    if (!arrived_.empty()) finish_arrived();
    if (!acks_due_.empty()) acknowledge();
    if (!with_messages_.empty()) busy |= post_messages();
    rounds++;
    idle_rounds = busy ? 0 : idle_rounds + 1;
    if (rounds % 1024 == 0 || idle_rounds > 100) {
      const uint64_t now = now_ns();
      if (rounds % 64 == 0) check_timeouts(now);
      stats_.rejected_at_fabric.raise(transport_->rejected_messages());
      stats_.nameless_failures.raise(nameless_ + transport_->internal_failures(&internal_failure_));
      drain();
      apply_adds();
      if (proxy_state_->any_excluded())
        for (auto& s : peers_)
          if (s && proxy_state_->excluded(s->pe)) complete_ready_flushes(s.get());
      if (proxy_state_->stopping.load(std::memory_order_acquire)) {
        if (stop_at == 0) stop_at = now + 2000000000ull;
        if (may_end(idle_rounds > 100 && idle()) || now > stop_at) break;
      }
    }
    // A shared core is better spent on threads that have work; a dedicated one keeps polling.
    if (!options_.dedicated && idle_rounds > 50) {
      if (idle_rounds < 2000) sched_yield();
      else std::this_thread::sleep_for(std::chrono::microseconds(idle_rounds < 5000 ? 50 : 250));
    }
  }
  may_close_ = !proxy_state_->aborted() && idle() && transport_->idle();
  if (proxy_state_->aborted()) {
    notify_abort();
    transport_->abandon(); // here, since the process may end without closing
  }
  memory_.reset(); // in the thread that has the device's context
} catch (const std::exception& e) {
  fail("FabricError", std::string("the proxy thread ended: ") + e.what(), -1, "", 0);
}

// Flushes: their conditions, and the tickets that they complete.
bool Worker::enqueue_flush(QueueState* q, const Request& r, uint64_t position) {
  const bool part = r.command == Command::flush_part;
  const bool owns_entry = !part || (q->index == 0 && make_ticket(0, position) == r.value);
  if (owns_entry && q->queue->is_open(position)) return false;
  auto covers = [&](const PeerState& s) {
    if (proxy_state_->excluded(s.pe)) return false; // it may have ended without an answer
    return r.pe == kAllPes ? (uint32_t)s.pe % (uint32_t)options_.queues == q->index : (uint32_t)s.pe == r.pe;
  };
  for (auto& s : peers_)
    if (s && covers(*s) && !has_room(*s)) return false;
  stats_.flushes.add();
  if (owns_entry) q->queue->begin(position);
  const uint32_t index = flushes_.take();
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
      append_mark(s, s->out.flush(), true);
      s->needs_flush_mark = false;
    }
    s->intervals.push(Interval());
    proxy_state_->set_awaited(s->pe, true);
    complete_ready_flushes(s);
  }
  finish_flush(index); // its own count, which kept it alive until here
  return true;
}

// Ends the flushes at the head of the peer whose conditions are met; all flushes of an excluded PE.
void Worker::complete_ready_flushes(PeerState* s) {
  const bool excluded = proxy_state_->excluded(s->pe);
  while (s->intervals.size() > 1) {
    const Interval& e = s->intervals.front();
    if (!excluded && (e.outstanding || (e.has_mark && s->out.settled_marks() <= e.mark))) return;
    const uint32_t flush = e.flush;
    s->intervals.pop();
    s->first_interval++;
    finish_flush(flush);
  }
  proxy_state_->set_awaited(s->pe, false);
}

void Worker::finish_flush(uint32_t index) {
  Flush& f = flushes_[index];
  if (--f.remaining) return;
  stats_.flush.add(ticks() - f.started);
  if (f.part) proxy_state_->flush_part_done(f.ticket);
  else f.queue->queue->complete(f.position);
  flushes_.release(index);
}

// Work between the threads of one peer: chunks go from the owner to workers, results return.
// Posts one chunk of the peer's first operation through the thread with the fewest chunks, preferably this one: a put
// of one chunk takes the same path as without workers. False: no thread takes more now.
bool Worker::post_shared(PeerState* s) {
  Op& op = s->ops.front();
  const uint64_t bytes = std::min(op.bytes, op.chunk);
  if (bytes < options_.shared_bytes) return post_own(s, false);
  const auto least = (size_t)(std::min_element(s->delegated.begin(), s->delegated.end()) - s->delegated.begin());
  const bool full = s->delegated[least] >= kMostDelegated;
  if (full || s->own_pieces <= s->delegated[least]) {
    if (post_own(s, false)) return true;
    if (full) return false;
  }
  WorkTransfer h = {WorkTransfer::piece, s->pe, (int)least, 1, op};
  h.op.bytes = h.op.chunk = bytes;
  h.op.marked = false; // the worker's slots bring no marks: only owners take them
  proxy_state_->inboxes[(size_t)thread_of(options_, s->pe, (int)least + 1)]->push(h);
  s->delegated[least]++;
  stats_.delegated.add();
  op.local += bytes;
  op.remote += bytes;
  op.bytes -= bytes;
  if (op.bytes) return true;
  if (op.marked) {
    s->outbox.append_record(s->marks.front());
    s->marks.pop();
    mark_has_messages(s);
  }
  s->ops.pop();
  return true;
}

// To the peer's owner: a chunk is in the heap and visible there.
void Worker::notify_arrival(PeerState* s, uint32_t group) {
  WorkTransfer h = {WorkTransfer::arrived, s->pe, 0, 1, {}};
  h.op.group = group;
  proxy_state_->inboxes[thread_of(options_, s->pe)]->push(h);
}

// To the peer's owner: chunks that it gave are posted and complete.
void Worker::notify_completion(PeerState* s, const InFlightOp& f) {
  const int owner = thread_of(options_, s->pe);
  const int worker = (index_ - owner + options_.threads) % options_.threads - 1;
  WorkTransfer h = {WorkTransfer::complete, s->pe, worker, f.pieces, {}};
  h.op.command = f.command;
  h.op.interval = f.interval;
  h.op.get = f.index;
  h.op.bytes = f.bytes;
  proxy_state_->inboxes[owner]->push(h);
}

// Takes work that other threads have transferred.
void Worker::drain_inbox() {
  inbox_->take(&transfers_);
  for (const WorkTransfer& h : transfers_) {
    PeerState* s = peers_[h.pe].get();
    switch (h.kind) {
    case WorkTransfer::piece:
      s->ops.push(h.op);
      activate(s);
      break;
    case WorkTransfer::complete:
      s->delegated[h.worker] -= h.pieces;
      s->progress++;
      s->settle(h.op.interval, h.pieces);
      if (h.op.command == Command::get) finish_get(h.op.get, h.op.bytes);
      if (s->intervals.size() > 1) complete_ready_flushes(s);
      break;
    case WorkTransfer::arrived:
      if (!s->in.chunk(h.op.group))
        return protocol_error(s->pe, concat("more data than announced for group ", h.op.group));
      apply(s);
      break;
    }
  }
}

// Whether this thread may end. A thread that shares peers stays while others can still transfer work to it.
bool Worker::may_end(bool is_idle) {
  if (!inbox_) return is_idle;
  if (is_idle != counted_idle_) {
    counted_idle_ = is_idle;
    proxy_state_->idle_threads.fetch_add(is_idle ? 1 : -1, std::memory_order_acq_rel);
  }
  return is_idle && proxy_state_->idle_threads.load(std::memory_order_acquire) == options_.threads;
}

} // namespace tsn::proxy
