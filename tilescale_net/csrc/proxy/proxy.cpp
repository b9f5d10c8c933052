#include "tilescale_net/csrc/proxy/proxy.h"

#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include "tilescale_net/device/add_mailbox.h"

#include <iterator>
#include <pthread.h>

namespace tsn::proxy {
namespace {

constexpr uint32_t kBlobMagic = 0x74736e70;

void check(const ProxyOptions& o) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument("proxy: " + what); };
  auto number = [](auto n) { return std::to_string(n); };
  if (o.n_pes < 1 || (uint32_t)o.n_pes >= kAllPes)
    refuse(number(o.n_pes) + " PEs; descriptors can name 1 to " + number(kAllPes - 1));
  if (o.rank < 0 || o.rank >= o.n_pes) refuse("rank " + number(o.rank) + " of " + number(o.n_pes) + " PEs");
  if (o.queues < 1 || o.queues > kMaxQueues)
    refuse(number(o.queues) + " queues; there may be 1 to " + number(kMaxQueues));
  if (o.threads < 1) refuse(number(o.threads) + " threads");
  if (o.peer_threads < 1 || o.peer_threads > o.threads)
    refuse(number(o.peer_threads) + " threads for a peer; there may be 1 to " + number(o.threads) +
           ", the number of threads");
  if (o.threads > o.queues + o.peer_threads - 1)
    refuse(number(o.threads) + " threads for " + number(o.queues) + " queues, of which " + number(o.peer_threads) +
           " serve one peer; every thread needs a queue or peers that it shares with one that has");
  if (o.capacity < 2 || (o.capacity & (o.capacity - 1)))
    refuse("a queue of " + number(o.capacity) + " descriptors; the number must be a power of two of at least 2");
  if (o.heap.bytes <= kSystemBytes || o.heap.bytes > kMaxOffset)
    refuse("a heap of " + number(o.heap.bytes) + " bytes; descriptors reach " + number(kMaxOffset) +
           ", and the first " + number(kSystemBytes) + " belong to the package");
  if (o.chunk_bytes < 64) refuse("pieces of " + number(o.chunk_bytes) + " bytes; the least is 64");
  if (adds_are_deferred(o) && o.threads > kMaxAddMailboxes)
    refuse(number(o.threads) + " threads; a heap whose kernels carry out the adds serves at most " +
           number(kMaxAddMailboxes));
  if (!(o.timeout > 0)) refuse("a timeout of " + number(o.timeout) + " s");
  for (int pe : o.peers)
    if (pe < 0 || pe >= o.n_pes || pe == o.rank) refuse("PE " + number(pe) + " cannot be a peer");
}

void add_stage(std::map<std::string, double>* out, const std::string& name,
               const std::vector<const ProxyStats*>& threads, StageStats ProxyStats::* stage) {
  double count = 0, sum = 0, max = 0, bucket[48] = {};
  for (const ProxyStats* thread : threads) {
    const StageStats& s = thread->*stage;
    count += (double)s.count.get();
    sum += (double)s.sum.get();
    max = std::max(max, (double)s.max.get());
    for (int b = 0; b < 48; b++) bucket[b] += (double)s.bucket[b].get();
  }
  const double us = 1e-3 / ticks_per_ns();
  // Percentiles are upper ends of their buckets, so within a factor of two.
  auto percentile = [&](double share) {
    double seen = 0;
    for (int b = 0; b < 48; b++)
      if ((seen += bucket[b]) >= share * count) return std::min(max, (double)(2ull << b)) * us;
    return max * us;
  };
  (*out)[name + "_count"] = count;
  (*out)[name + "_us_mean"] = count > 0 ? sum / count * us : 0;
  (*out)[name + "_us_p50"] = count > 0 ? percentile(0.5) : 0;
  (*out)[name + "_us_p99"] = count > 0 ? percentile(0.99) : 0;
  (*out)[name + "_us_max"] = max * us;
}

// By name, times in microseconds; sums over the threads.
std::map<std::string, double> summarise(const std::vector<const ProxyStats*>& threads) {
  std::map<std::string, double> out;
  const auto sum = [&](const char* names, const auto&... counters) {
    ((out[next_name(&names)] += (double)counters.get()), ...);
  };
  for (const ProxyStats* thread : threads) {
    const ProxyStats& t = *thread;
    sum(TSN_NAMED(t.puts, t.put_signals, t.put_values, t.signals, t.gets, t.fences, t.flushes, t.bytes_put, t.bytes_got,
                  t.chunks, t.messages, t.records, t.inlined, t.delegated, t.unrung, t.retries, t.held,
                  t.nameless_failures, t.rejected_messages, t.chunks_in, t.records_in, t.signals_applied, t.acks_sent));
    sum("rejected_messages", t.rejected_at_fabric);
    double &depth = out["queue_depth_max"], &in_flight = out["in_flight_max"];
    depth = std::max(depth, (double)t.queue_depth_max.get());
    in_flight = std::max(in_flight, (double)t.in_flight_max.get());
  }
  using S = ProxyStats;
  for (const auto& [name, stage] :
       {std::pair{"pop", &S::pop}, {"post", &S::post}, {"completion", &S::completion}, {"flush", &S::flush}})
    add_stage(&out, name, threads, stage);
  return out;
}

} // namespace

Proxy::Proxy(const ProxyOptions& options, const TransportFactory& make) : options_(options), proxy_state_(options_) {
  check(options_);
  // A thread has at least 64 immediates to send before its peer answers, for any number of PEs.
  options_.transport.immediates = std::max(4096u, 64u * (uint32_t)options_.peers.size());
  const bool cuda = options_.heap.kind == Memory::cuda;
  std::optional<cuda::PrimaryContext> context; // memory is pinned in it
  if (cuda) context.emplace(options_.heap.device);
  for (int q = 0; q < options_.queues; q++) {
    memory_.push_back(std::make_unique<cuda::PinnedBlock>(HostQueue::memory_bytes(options_.capacity), cuda));
    proxy_state_.queues.push_back(
        std::make_unique<TrackedQueue>(memory_.back()->data(), options_.capacity, options_.first_position));
  }
  prepare_words();
  if (options_.peer_threads > 1)
    for (int t = 0; t < options_.threads; t++) proxy_state_.inboxes.push_back(std::make_unique<Inbox>());
  for (int t = 0; t < options_.threads; t++)
    workers_.push_back(std::make_unique<Worker>(&proxy_state_, t, make(options_.transport)));
}

Proxy::~Proxy() { close(); }

void Proxy::require(State state, const char* call) const {
  static const char* const names[] = {"created", "connected", "running", "stopped", "closed"};
  if (state_ != state)
    throw std::logic_error(concat("proxy of rank ", options_.rank, ": ", call, "() needs a proxy that is ",
                                  names[(int)state], "; this one is ", names[(int)state_]));
}

std::vector<QueueView> Proxy::views() const {
  std::vector<QueueView> out;
  for (int q = 0; q < options_.queues; q++) {
    const uint64_t words =
        reinterpret_cast<uint64_t>(options_.heap.base) + 8ull * (uint64_t)(kQueueWords + q * kQueueWordsStride);
    out.push_back(proxy_state_.queues[q]->host.view(memory_[q]->device(), words, words + 8 * kTailCacheWord));
  }
  return out;
}

std::map<std::string, uint64_t> Proxy::sizes() const {
  std::map<std::string, uint64_t> found;
  for (const auto& block : memory_) found["queue_bytes"] += block->bytes();
  for (const auto& worker : workers_) {
    found["window_bytes"] += worker->window_bytes();
    found["staging_bytes"] += worker->staging_bytes();
    found["endpoints"] += (uint64_t)worker->properties().rails;
  }
  return found;
}

// Head and cached tail start where the consumer starts.
void Proxy::prepare_words() {
  for (const QueueView& v : views()) {
    for (uint64_t address : {v.head, v.tail_cache}) {
      if (options_.heap.kind == Memory::host) {
        __atomic_store_n(reinterpret_cast<uint64_t*>(address), options_.first_position, __ATOMIC_RELEASE);
      } else {
        const auto& d = cuda::driver();
        cuda::check(d.cuMemcpyHtoDAsync(address, &options_.first_position, 8, nullptr), "cuMemcpyHtoDAsync");
        cuda::check(d.cuStreamSynchronize(nullptr), "cuStreamSynchronize");
      }
    }
  }
}

std::string Proxy::address() const {
  if (state_ == State::closed) throw std::logic_error("proxy: a closed one has no address");
  BlobWriter w(kBlobMagic);
  w.number((uint64_t)options_.queues);
  w.number((uint64_t)options_.threads);
  w.number((uint64_t)options_.peer_threads);
  w.number(options_.heap.bytes);
  w.number(options_.window.groups);
  w.number(options_.window.marks);
  for (const auto& e : workers_) w.text(e->address());
  return w.take();
}

void Proxy::connect(const std::vector<std::string>& addresses) {
  require(State::created, "connect");
  const std::string us = concat("rank ", options_.rank);
  if (addresses.size() != (size_t)options_.n_pes)
    throw FabricError(concat(us, ": ", addresses.size(), " proxy addresses for ", options_.n_pes, " PEs"));
  for (int pe : options_.peers) {
    const std::string them = concat("rank ", pe);
    BlobReader r(addresses[pe], kBlobMagic, us + ": the proxy address of " + them);
    auto agree = [&](const char* what, uint64_t ours) {
      const uint64_t theirs = r.number();
      if (theirs != ours)
        throw FabricError(concat(us, " has ", what, " ", ours, ", ", them, " has ", theirs,
                                 "; start all ranks with the same options"));
    };
    agree("number of queues", (uint64_t)options_.queues);
    agree("number of proxy threads", (uint64_t)options_.threads);
    agree("number of threads for a peer", (uint64_t)options_.peer_threads);
    agree("heap size", options_.heap.bytes);
    agree("group window", options_.window.groups);
    agree("mark window", options_.window.marks);
    std::vector<std::string> theirs;
    for (int t = 0; t < options_.threads; t++) theirs.push_back(r.text());
    for (int i = 0; i < options_.peer_threads; i++)
      workers_[thread_of(options_, pe, i)]->connect(pe, theirs[thread_of(options_, options_.rank, i)]);
    uint64_t chunk = ~0ull;
    for (int i = 0; i < options_.peer_threads; i++)
      chunk = std::min(chunk, workers_[thread_of(options_, pe, i)]->chunk_of(pe));
    workers_[thread_of(options_, pe)]->limit_chunk(pe, chunk);
  }
  state_ = State::connected;
}

void Proxy::start() {
  require(State::connected, "start");
  state_ = State::running;
  for (size_t t = 0; t < workers_.size(); t++) {
    threads_.emplace_back([this, t] {
      const std::string name = concat("tsn-proxy-", t);
      pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
      workers_[t]->run();
    });
    if (options_.cpus.empty()) continue;
    const int cpu = options_.cpus[t % options_.cpus.size()];
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set) != 0) {
      stop();
      throw std::invalid_argument(
          concat("proxy: thread ", t, " cannot run on CPU ", cpu, ", which this process may not use"));
    }
  }
}

bool Proxy::await(double seconds, const std::function<bool(const Worker&)>& done) const {
  const uint64_t end = now_ns() + (uint64_t)(seconds * 1e9);
  for (;;) {
    if (proxy_state_.aborted()) return false;
    if (std::all_of(workers_.begin(), workers_.end(), [&](const auto& w) { return done(*w); })) return true;
    if (now_ns() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool Proxy::drain(double seconds) {
  require(State::running, "drain");
  const uint64_t number = proxy_state_.drains.fetch_add(1, std::memory_order_acq_rel) + 1;
  return await(seconds, [&](const Worker& w) { return w.drained(number); });
}

bool Proxy::apply_adds(double seconds) {
  require(State::running, "apply_adds");
  if (!adds_are_deferred(options_)) return !proxy_state_.aborted();
  const uint64_t number = proxy_state_.settles.fetch_add(1, std::memory_order_acq_rel) + 1;
  return await(seconds, [&](const Worker& w) { return w.applied_adds(number); });
}

void Proxy::exclude(const std::vector<int>& peers) {
  for (int pe : peers)
    if (pe < 0 || pe >= options_.n_pes) throw std::invalid_argument(concat("proxy: PE ", pe, " cannot be excluded"));
  for (int pe : peers) proxy_state_.exclude(pe);
}

std::vector<int> Proxy::awaited() const {
  std::vector<int> found;
  std::copy_if(options_.peers.begin(), options_.peers.end(), std::back_inserter(found),
               [&](int pe) { return proxy_state_.awaited(pe); });
  return found;
}

void Proxy::close() {
  stop();
  if (state_ == State::closed) return;
  state_ = State::closed;
  for (const auto& worker : workers_) worker->close();
}

void Proxy::stop() {
  if (state_ != State::closed) state_ = State::stopped;
  proxy_state_.stopping.store(true, std::memory_order_release);
  const bool ran = !threads_.empty();
  for (std::thread& t : threads_) t.join();
  threads_.clear();
  if (!ran || !options_.print_stats) return;
  std::string line = concat("tilescale_net proxy of rank ", options_.rank, ":");
  for (const auto& [name, value] : stats()) {
    char text[96];
    std::snprintf(text, sizeof text, " %s=%.6g", name.c_str(), value);
    if (value != 0) line += text;
  }
  std::fprintf(stderr, "%s\n", line.c_str());
}

std::map<std::string, double> Proxy::stats() const {
  std::vector<const ProxyStats*> each;
  for (const auto& e : workers_) each.push_back(&e->stats());
  return summarise(each);
}

} // namespace tsn::proxy
