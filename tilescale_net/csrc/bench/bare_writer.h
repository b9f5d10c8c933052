// A CPU that writes to a peer without queue, descriptors or ordering: the limit that a provider sets to the proxy.
//
// It uses a Transport as the proxy does, with the same pieces and window, on the same memory: GPU memory that the
// transport cannot reach goes through pinned slots (bare_staging.h). Two processes run it side by side: write() and
// finish() against serve(), ping() against pong().
#pragma once

#include "tilescale_net/csrc/bench/bare_staging.h"
#include "tilescale_net/csrc/bench/network.h"

#include <memory>
#include <string>
#include <vector>

namespace tsn::bench {

struct BareWriterOptions {
  uint64_t bytes = 64 << 20; // of the buffer
  uint64_t base = 0;         // memory to use; 0: host memory of its own
  bool cuda = false;         // `base` is on a GPU
  int device = 0;            // its number
  bool staged = false;       // go through pinned slots even where the transport reaches the memory
  uint64_t chunk_bytes = 1 << 20;
  uint32_t window = 64;  // pieces on the way, over all rails
  bool dedicated = true; // the thread has a core of its own: it never gives way while idle, see ProxyOptions
  double timeout = 20;   // seconds without an event after which a call gives up
  TransportOptions transport;
};

class BareWriter {
public:
  // Throws FabricError.
  explicit BareWriter(const BareWriterOptions& options);
  ~BareWriter();

  std::string address() const;
  void connect(int peer, const std::string& address);

  // Writes `bytes` bytes `count` times; with `blocking` each is complete before the next begins. Seconds from the first
  // post to the last completion; the data are at the peer if the provider has delivery-complete. `from`: a peer, or -1,
  // that writes here at the same time; serve() it afterwards.
  double write(int peer, uint64_t bytes, int count, bool blocking, int from);
  // Round trips of a write with an immediate, answered in kind by the peer's pong() of the same size and count; seconds
  // for all of them. Half of a round trip is the one-way time, until the target's CPU has seen the data.
  double ping(int peer, uint64_t bytes, int count) { return exchange(peer, bytes, count, true); }
  void pong(int peer, uint64_t bytes, int count) { exchange(peer, bytes, count, false); }
  // Drives progress for the peer's write() until it calls finish().
  void serve(int peer);
  // Ends the peer's serve().
  void finish(int peer);

  const Properties& properties() const { return transport_->properties(); }

private:
  struct Buffer;
  int poll();
  void check_timeout(uint64_t* since, const std::string& what);
  double write_staged(int peer, uint64_t bytes, int count, bool blocking, int from);
  double exchange_staged(int peer, uint64_t bytes, int count, bool first);
  void post_staged(int peer);
  void return_slot(int peer, uint32_t slot);
  void land(int peer);
  double exchange(int peer, uint64_t bytes, int count, bool first);
  void post(const Transport::Copy& copy);
  void fail(const std::string& what);

  BareWriterOptions options_;
  std::unique_ptr<Buffer> buffer_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BareStaging> staging_; // nullptr: the transport reaches the memory
  Region region_ = -1;
  std::vector<RemoteRegion> remote_;
  std::vector<Event> events_;
  std::vector<uint64_t> out_; // bytes on the way, by rail
  uint64_t posted_ = 0, completed_ = 0;
  uint64_t immediates_ = 0, seen_ = 0; // arrived, and answered or taken as an answer
  uint32_t idle_ = 0;                  // polls without an event
  std::vector<uint32_t> arrivals_;     // staged: slots that pieces have arrived in
  bool finished_ = false;
};

} // namespace tsn::bench
