// One proxy thread: takes descriptors from its queues, posts them, and serves its peers.
//
// The loop (worker.cpp) never waits. Descriptors are checked, numbered, and put on their peer's list; their chunks
// are posted as far as the transport takes them (worker_send.cpp); arrivals are counted and applied
// (worker_receive.cpp). A flush is another operation that completes later. If several threads serve a peer, they
// share large chunks.
#pragma once

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/trace_ring.h"
#include "tilescale_net/csrc/proxy/options.h"
#include "tilescale_net/csrc/proxy/peer_state.h"
#include "tilescale_net/csrc/proxy/queue.h"
#include "tilescale_net/csrc/proxy/staging.h"
#include "tilescale_net/csrc/proxy/stats.h"
#include "tilescale_net/csrc/proxy/wire.h"
#include "tilescale_net/device/descriptor.h"

namespace tsn::proxy {

// A device queue, and the entries of its board that belong to an open ticket.
struct TrackedQueue {
  TrackedQueue(void* memory, uint32_t capacity, uint64_t start)
      : host(memory, capacity, start), open(new std::atomic<uint8_t>[capacity]()) {}
  bool is_open(uint64_t position) const {
    return open[position & (host.capacity() - 1)].load(std::memory_order_acquire) != 0;
  }
  void begin(uint64_t position) { open[position & (host.capacity() - 1)].store(1, std::memory_order_relaxed); }
  // Notifies the device, then frees the entry. Any thread.
  void complete(uint64_t position) {
    host.complete(position);
    open[position & (host.capacity() - 1)].store(0, std::memory_order_release);
  }
  HostQueue host;
  std::unique_ptr<std::atomic<uint8_t>[]> open;
};

// State shared by the threads of one proxy: failure and abort, and tickets that several queues complete together.
class ProxyState {
public:
  explicit ProxyState(const ProxyOptions& o)
      : options(o), excluded_(new std::atomic<bool>[(size_t)std::max(o.n_pes, 1)]()),
        awaited_(new std::atomic<bool>[(size_t)std::max(o.n_pes, 1)]()) {}

  const ProxyOptions& options;
  std::vector<std::unique_ptr<TrackedQueue>> queues;
  std::vector<std::unique_ptr<Inbox>> inboxes; // of the threads, if several serve one peer
  std::atomic<int> idle_threads{0};            // threads without work, while stopping
  std::atomic<uint64_t> drains{0};             // calls of Proxy::drain() so far
  std::atomic<uint64_t> settles{0};            // calls of Proxy::apply_adds() so far
  std::atomic<bool> stopping{false};           // by the owner: finish queued work, then end
  std::atomic<bool> failed{false};             // by any thread: end now

  // The first failure is kept; the device's waits and all threads end.
  void fail(Failure failure) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failed.load(std::memory_order_relaxed)) return;
      failure_ = std::move(failure);
      failed.store(true, std::memory_order_release);
    }
    if (options.abort_word) __atomic_store_n(reinterpret_cast<uint32_t*>(options.abort_word), 1u, __ATOMIC_RELEASE);
  }
  bool aborted() const {
    return failed.load(std::memory_order_acquire) ||
           (options.abort_word &&
            __atomic_load_n(reinterpret_cast<const uint32_t*>(options.abort_word), __ATOMIC_ACQUIRE) != 0);
  }
  bool failure(Failure* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed.load(std::memory_order_relaxed)) *out = failure_;
    return failed.load(std::memory_order_relaxed);
  }

  // Excludes the PE, which may end at any time: see Proxy::exclude(). Any thread.
  void exclude(int pe) {
    excluded_[pe].store(true, std::memory_order_release);
    any_excluded_.store(true, std::memory_order_release);
  }
  bool any_excluded() const { return any_excluded_.load(std::memory_order_acquire); }
  bool excluded(int pe) const { return excluded_[pe].load(std::memory_order_acquire); }

  // Whether a flush waits for the PE. Written by its owner thread, read by any.
  void set_awaited(int pe, bool awaited) { awaited_[pe].store(awaited, std::memory_order_relaxed); }
  bool awaited(int pe) const { return awaited_[pe].load(std::memory_order_relaxed); }

  // The reason of the owner's abort, for threads without their own failure; see Proxy::explain().
  void explain(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  std::string reason() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed.load(std::memory_order_relaxed) ? failure_.text : reason_;
  }

  // One of the queues has done its part of a flush of all PEs.
  void flush_part_done(uint64_t ticket) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const uint32_t done = ++parts_done_[ticket];
      if (done < queues.size()) return;
      parts_done_.erase(ticket);
    }
    queues[ticket_queue(ticket)]->complete(ticket & kTicketPositionMask); // ticket_done() compares only these bits
  }

private:
  std::mutex mutex_;
  Failure failure_;
  std::string reason_;
  std::unordered_map<uint64_t, uint32_t> parts_done_;
  std::unique_ptr<std::atomic<bool>[]> excluded_, awaited_; // by PE
  std::atomic<bool> any_excluded_{false};
};

// The events of one proxy thread for TSN_TRACE; written by that thread.
class WorkerTrace {
public:
  // Throws std::runtime_error when the file is no ring.
  explicit WorkerTrace(const std::string& path) : ring_(path), ticks_per_ns_(ticks_per_ns()) {
    for (uint32_t c = 0; c < kCommandCount; c++) names_[c] = ring_.name(name_of((Command)c));
    slot_ = ring_.name("staging slot");
    message_ = ring_.name("message");
    delivered_ = ring_.name("signal delivered");
  }

  // A descriptor was taken from a queue.
  void entry(const Request& r) {
    TraceEvent e = now(TraceKind::entry, names_[(uint32_t)r.command % kCommandCount], r.pe == kAllPes ? -1 : (int)r.pe);
    e.bytes = r.bytes;
    e.value = r.value;
    if (r.signal) e.word = r.signal;
    ring_.add(e);
  }
  // A write or read was posted at `started` (ticks) and is complete; `id` distinguishes transfers that are in flight
  // together.
  void transfer(Command command, int pe, uint64_t bytes, uint64_t started, uint32_t id) {
    TraceEvent e = since(TraceKind::transfer, names_[(uint32_t)command], pe, started);
    e.bytes = bytes;
    e.value = id;
    ring_.add(e);
  }
  // Copies into a staging slot began at `started` (ticks) and are complete.
  void staged(int pe, uint64_t bytes, uint64_t started) {
    TraceEvent e = since(TraceKind::staging, slot_, pe, started);
    e.bytes = bytes;
    ring_.add(e);
  }
  void message(int pe) { ring_.add(now(TraceKind::entry, message_, pe)); }
  // A signal of `pe` was applied to the word at this offset.
  void delivered(int pe, uint64_t word, uint64_t value) {
    TraceEvent e = now(TraceKind::delivered, delivered_, pe);
    e.word = word;
    e.value = value;
    ring_.add(e);
  }

private:
  TraceEvent now(TraceKind kind, uint32_t name, int pe) const {
    TraceEvent e;
    e.begin_ns = e.end_ns = now_ns();
    e.kind = kind;
    e.name = name;
    e.pe = pe;
    return e;
  }
  TraceEvent since(TraceKind kind, uint32_t name, int pe, uint64_t started) const {
    TraceEvent e = now(kind, name, pe);
    e.begin_ns -= (uint64_t)((double)(ticks() - started) / ticks_per_ns_);
    return e;
  }

  TraceRing ring_;
  double ticks_per_ns_;
  uint32_t names_[kCommandCount], slot_, message_, delivered_;
};

class Worker {
public:
  // Registers memory with the transport. Throws FabricError, CudaError.
  Worker(ProxyState* proxy_state, int index, std::unique_ptr<Transport> transport);
  ~Worker();

  // The address of this worker for a peer's.
  std::string address() const;
  // `address`: of the peer's worker that serves this PE. Throws FabricError.
  void connect(int peer, const std::string& address);
  // Bytes of the largest chunk to the peer; after connect(). Equal in all threads that serve a peer.
  uint64_t chunk_of(int peer) const { return peers_[peer]->chunk; }
  void limit_chunk(int peer, uint64_t bytes) { peers_[peer]->chunk = bytes; }

  // The loop; returns after stopping or failure.
  void run();

  // Whether everything up to drain number `n` was sent and received. Any thread.
  bool drained(uint64_t n) const { return drained_.load(std::memory_order_acquire) >= n; }
  // Whether the deferred adds of Proxy::apply_adds() number `n` were applied. Any thread.
  bool applied_adds(uint64_t n) const { return applied_adds_.load(std::memory_order_acquire) >= n; }
  // After run(): closes the endpoints, or leaves them to the end of the process if operations are in flight.
  void close();

  const ProxyStats& stats() const { return stats_; }
  const Properties& properties() const { return properties_; }
  bool staged() const { return staged_; }
  uint64_t chunk_bytes() const { return chunk_; }
  // Set-up for its peers: windows, and slots of both directions.
  uint64_t window_bytes() const;
  uint64_t staging_bytes() const { return staging_ ? staging_->send.bytes() + staging_->receive.bytes() : 0; }
  uint32_t staging_slots() const { return staging_ ? staging_->shape().send_slots : 0; } // 0: nothing is staged

private:
  struct Abandoned;
  struct QueueState {
    TrackedQueue* queue;
    uint32_t index;
    bool held = false; // `request` was popped and could not be accepted yet
    uint64_t position = 0;
    Request request = {};
  };
  struct InFlightOp { // a posted chunk
    PeerState* peer = nullptr;
    Command command = Command::none;
    int32_t rail = 0;
    uint32_t interval = 0;
    uint32_t pieces = 1;
    uint32_t index = 0; // reads: into gets_ (of the owner thread); staged writes: the send slot
    uint64_t bytes = 0, offset = 0, started = 0;
  };
  struct Get {
    QueueState* queue = nullptr; // nullptr: free
    PeerState* peer = nullptr;
    uint64_t position = 0, remaining = 0;
    uint32_t interval = 0;
    bool answered = false; // by request: its data are in flight into the heap
  };
  struct Flush {
    QueueState* queue = nullptr;
    uint64_t position = 0, started = 0;
    uint32_t remaining = 0; // peers
    bool part = false;      // of a ticket that all queues complete
    uint64_t ticket = 0;
  };
  struct Rail {
    uint32_t ops = 0;
    uint64_t bytes = 0;
    bool full = false; // answered `again`; until the next poll
  };
  struct Arrived { // a get by request whose data, or a slot whose chunks, are in flight into the heap
    enum Kind : uint8_t { answer, slot, piece };
    uint64_t position;
    PeerState* peer;
    uint32_t index; // of the get or the slot; of a chunk that a worker has received, its group
    Kind kind;
  };

  // worker_send.cpp: from queues to peers
  bool drain_queue(QueueState* q);
  bool valid(const Request& r, std::string* why) const;
  bool enqueue(QueueState* q, const Request& r, uint64_t position);
  bool enqueue_flush(QueueState* q, const Request& r, uint64_t position);
  bool enqueue_get(QueueState* q, PeerState* s, const Request& r, uint64_t position);
  void enqueue_write(PeerState* s, Command command, uint64_t remote, uint64_t local, uint64_t bytes, MarkOp op,
                     uint64_t word, uint64_t value);
  void mark_has_messages(PeerState* s) {
    if (!s->has_messages) with_messages_.push_back(s), s->has_messages = true;
  }
  void append_value(PeerState* s, uint64_t offset, const void* data, uint32_t bytes, uint64_t group);
  void append_mark(PeerState* s, const MarkRecord& mark, bool behind = false);
  bool has_room(const PeerState& s) const {
    return s.out.room() && s.ops.size() < kMaxOps && s.outbox.backlog() < kMaxBacklog;
  }
  uint64_t pieces_of(const PeerState& s, uint64_t bytes, uint64_t* chunk) const;
  void complete_ready_flushes(PeerState* s);
  void finish_flush(uint32_t index);
  void activate(PeerState* s);

  // worker_send.cpp: from peers to the transport, and back
  bool post_all();
  bool post_next(PeerState* s, bool more);
  bool post_own(PeerState* s, bool more);
  bool post_slots();
  bool post_messages();
  int pick_rail();
  InFlightOp& begin_op(PeerState* s, Command command, int rail, uint32_t* index);
  void commit_op(const InFlightOp& f);
  void on_completion(uint32_t index);
  void on_post_failed(PeerState* s, Post post, Command command, uint64_t offset, uint64_t bytes);
  void failed_event(const Event& event);

  // worker.cpp: threads that share a peer
  bool post_shared(PeerState* s);
  void drain_inbox();
  void notify_arrival(PeerState* s, uint32_t group);
  void notify_completion(PeerState* s, const InFlightOp& f);
  bool may_end(bool is_idle);

  // worker_receive.cpp: peers' traffic
  bool poll_transport();
  void on_immediate(uint32_t imm);
  void on_message(const Event& event);
  bool on_records(PeerState* s, const char* data, uint64_t bytes);
  bool on_record(PeerState* s, const Record& record);
  bool on_mark(PeerState* s, const MarkRecord& mark);
  bool on_ack(PeerState* s, const AckRecord& ack);
  bool on_credit(PeerState* s, const CreditRecord& credit);
  void on_abort(PeerState* s, const Record& record);
  bool on_slot(PeerState* s, uint32_t slot);
  void serve_get_requests(PeerState* s);
  void apply(PeerState* s);
  void finish_arrived();
  void acknowledge();
  void mark_ack_due(PeerState* s);
  void finish_get(uint32_t index, uint64_t bytes);
  void protocol_error(int pe, const std::string& what);

  // worker.cpp
  void check_timeouts(uint64_t now);
  bool idle();
  void drain();
  void apply_adds();
  void notify_abort();
  [[gnu::cold]] void fail(const std::string& kind, const std::string& text, int pe, const std::string& operation,
                          uint64_t offset);

  static constexpr size_t kMaxOps = 1024;          // accepted and unposted, per peer
  static constexpr size_t kMaxBacklog = 64;        // unposted messages, per peer
  static constexpr uint32_t kMaxGetRequests = 256; // gets by request, per peer
  static constexpr int kPopsPerVisit = 256;
  static constexpr int kPostsPerTurn = 16;
  static constexpr uint64_t kMostUnrung = 32768; // bytes of a chunk that may wait for the next one's doorbell
  static constexpr uint32_t kMostDelegated = 16; // chunks of a peer that a worker has at a time

  ProxyState* proxy_state_;
  const ProxyOptions& options_;
  const int index_;
  std::unique_ptr<Transport> transport_; // nullptr: closed
  const Properties properties_;
  bool staged_ = false;
  bool may_close_ = true;            // not running, and nothing is in flight
  std::atomic<uint64_t> drained_{0}; // the latest drain that is complete
  std::atomic<uint64_t> applied_adds_{0};
  std::unique_ptr<HeapMemory> memory_; // made in run(): CUDA contexts belong to threads
  std::unique_ptr<Staging> staging_;
  Region heap_region_ = -1, send_region_ = -1, receive_region_ = -1;

  std::vector<QueueState> queues_;
  std::vector<std::unique_ptr<PeerState>> peers_; // by PE; nullptr: not served here
  std::vector<int> peer_index_;                   // by PE: index among this thread's peers
  Inbox* const inbox_;                            // nullptr: no peer is shared
  std::vector<WorkTransfer> transfers_;           // work taken from it
  bool counted_idle_ = false;                     // counted in ProxyState::idle_threads
  std::vector<PeerState*> active_, acks_due_, with_messages_;
  int group_bits_ = 0;
  uint64_t chunk_ = 0;
  uint32_t inline_bytes_ = 0;
  bool confirms_ = false;     // a write's completion here means that its data is in the peer's memory
  bool flushes_rdma_ = false; // and visible to the peer's kernels once the peer has flushed
  uint32_t rail_limit_ = 0, peer_limit_ = 0;
  uint64_t immediate_limit_ = 0; // that a peer may send before this side reports them
  HeapBounds bounds_;
  uint32_t next_rail_ = 0;
  int unrung_ = -1; // the rail that has chunks whose doorbell waits for the next one
  std::vector<Rail> rails_;

  Table<InFlightOp> in_flight_ops_;
  uint32_t in_flight_ = 0;
  uint64_t nameless_ = 0;        // failures with an unknown PE
  std::string internal_failure_; // the latest of the network's own packets that failed
  uint64_t stamp_ = 0;           // ticks() at the start of this round: reading the clock costs as much as posting
  Table<Get> gets_;
  Table<Flush> flushes_;
  Ring<Arrived> arrived_;
  std::vector<Event> events_;
  ProxyStats stats_;
  std::unique_ptr<WorkerTrace> trace_; // nullptr: nothing is traced
};

} // namespace tsn::proxy
