// Options of a proxy.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"
#include "tilescale_net/csrc/proxy/ordering.h"
#include "tilescale_net/device/descriptor.h"

namespace tsn::proxy {

// The network's names, as this folder uses them.
using namespace fabric;

// The proxy's failure; runtime/fabric.py turns it into an exception.
struct Failure {
  std::string kind;      // class of tilescale_net/errors.py: InvalidDescriptor, PeerLost, FabricError
  std::string text;      // the whole message
  int pe = -1;           // the PE concerned, or -1
  std::string operation; // "put", …, or ""
  uint64_t offset = 0;   // heap offset concerned, or 0
};

inline const char* name_of(Command c) {
  if (is_value_signal(c)) return (uint32_t)c < kCommandCount ? "put_signal" : "unknown operation";
  static const char* const names[] = {"nothing",   "put",       "put_signal", "put_signal", "get",   "signal", "signal",
                                      "put_value", "put_value", "put_value",  "put_value",  "fence", "flush",  "flush"};
  return names[(uint32_t)c];
}

struct ProxyOptions {
  int rank = 0;
  int n_pes = 1;
  std::vector<int> peers;   // the PEs to serve: kernels cannot reach them directly
  Memory heap;              // this PE's symmetric heap
  bool defers_adds = false; // see adds_are_deferred()
  uint64_t abort_word = 0;  // uint32_t* in host memory: set when the proxy gives up, and ends it when set by others
  int queues = 1;           // device queues; operations to a PE use queue pe % queues
  int threads = 1;          // proxy threads, each with its own endpoints; queue q belongs to thread q % threads
  int peer_threads = 1;     // that share the large chunks to one peer, see WorkTransfer
  uint32_t capacity = 1024; // descriptors in a queue's ring, a power of two
  std::vector<int> cpus;    // thread i runs on cpus[i % size] only; empty: anywhere
  bool dedicated = false;   // the threads have cores of their own: they never give way while idle
  uint64_t chunk_bytes = 1 << 20;    // puts travel in chunks of at most this size
  uint32_t inline_bytes = 128;       // puts up to this size travel inside messages, if the host can read the heap
  uint64_t shared_bytes = 1 << 16;   // chunks of at least this size are shared among a peer's threads
  bool force_staging = false;        // go through staging slots even if the transport could reach the heap
  uint64_t staging_bytes = 32 << 20; // for each of the two directions of a thread
  OrderWindow window = {4096, 1024};
  double timeout = 20;            // seconds without any sign of progress after which a peer counts as lost
  uint64_t first_position = 0;    // of the queues; for tests of the wrap-around
  bool trust_last_chunk = false;  // TEST ONLY: break the ordering on purpose, the package sets it for TSN_TEST_ORDERING
  std::vector<std::string> trace; // thread i writes its events to the ring in trace[i]; empty: no thread does
  bool print_stats = false;       // on stderr when the proxy stops
  TransportOptions transport;     // provider "null": completes at once and sends nothing, see testing/null_transport.h
};

// Whether adds to signal words are deferred to waiting kernels, see device/add_mailbox.h; always on GPUs.
inline bool adds_are_deferred(const ProxyOptions& options) {
  return options.defers_adds || options.heap.kind == Memory::cuda;
}

// The thread of rank `pe` that serves rank `peer`: its owner thread.
inline int thread_of(const ProxyOptions& options, int peer) { return peer % options.queues % options.threads; }
// The threads that share traffic to `peer`: number 0 is its owner, the others help.
inline int thread_of(const ProxyOptions& options, int peer, int number) {
  return (thread_of(options, peer) + number) % options.threads;
}
// The number of threads that are owners: they have a queue.
inline int owner_threads(const ProxyOptions& options) {
  return options.threads < options.queues ? options.threads : options.queues;
}

} // namespace tsn::proxy
