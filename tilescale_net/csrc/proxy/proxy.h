// The proxy of one PE: its device queues, its threads, and the calls of the host side.
//
// Life: construct (endpoints and memory registered), exchange address() with all PEs out of band, connect(), start().
// At the end drain(), a barrier among the PEs, then close(): a closed proxy no longer serves its peers, which send
// until all have drained. States and calls are in docs/states.md.
#pragma once

#include "tilescale_net/csrc/proxy/worker.h"

namespace tsn::proxy {

using TransportFactory = std::function<std::unique_ptr<Transport>(const TransportOptions&)>;

class Proxy {
public:
  // Throws FabricError, CudaError or std::invalid_argument that names the option.
  Proxy(const ProxyOptions& options, const TransportFactory& make);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  std::string address() const;
  // `addresses[pe]`: of every PE; entries of PEs that are not served may be empty. Throws FabricError.
  void connect(const std::vector<std::string>& addresses);
  void start();
  // Waits until everything that kernels have pushed so far has been received by its target, while peers are served on.
  // False: not within `seconds`, or the proxy has failed or was aborted.
  bool drain(double seconds);
  // Applies the adds to signal words of a GPU heap that were deferred to the next waiting kernel, before their memory
  // is reused. No kernel may run, here or at a peer that reaches this heap directly. False as drain().
  bool apply_adds(double seconds);
  // Finishes queued operations, within two seconds, and joins the threads. Safe to call twice.
  void stop();
  // stop(), then closes the endpoints. Operations still in flight then (after a failure) are left to the end of the
  // process, with their endpoints. Safe to call twice.
  void close();

  // The device's view of each queue; see device/context.h. `head` and `tail_cache` lie in the heap's system area.
  std::vector<QueueView> views() const;
  // Excludes PEs, which may end at any time: no rank waits for them, and their end is no failure. Their requests are
  // still served.
  void exclude(const std::vector<int>& peers);
  // The reason why the owner is about to set the abort word; sent to the peers. The first one is kept.
  void explain(const std::string& reason) { proxy_state_.explain(reason); }
  // The PEs that flushes wait for.
  std::vector<int> awaited() const;
  bool failure(Failure* out) { return proxy_state_.failure(out); }
  std::map<std::string, double> stats() const;
  const Properties& properties() const { return workers_[0]->properties(); }
  bool staged() const { return workers_[0]->staged(); }
  uint64_t chunk_bytes() const { return workers_[0]->chunk_bytes(); }
  uint32_t staging_slots() const { return workers_[0]->staging_slots(); }
  // The memory and endpoints of this proxy, by name.
  std::map<std::string, uint64_t> sizes() const;
  const ProxyOptions& options() const { return options_; }

private:
  enum class State { created, connected, running, stopped, closed };
  void require(State state, const char* call) const;
  bool await(double seconds, const std::function<bool(const Worker&)>& done) const;
  void prepare_words();

  ProxyOptions options_;
  ProxyState proxy_state_;
  std::vector<std::unique_ptr<cuda::PinnedBlock>> memory_; // of the queues
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  State state_ = State::created;
};

} // namespace tsn::proxy
