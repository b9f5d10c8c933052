// The network interface of the proxy and the fabric benchmarks, and nothing more.
//
// A Transport is one process's set of rails (network endpoints, one per NIC) over one provider. Peers are numbered by
// the caller, equally on all of them (a PE's rank is the natural choice). Set-up is collective and out of band:
//
//   auto transport = make_transport(options);                      // may throw FabricError
//   transport->connect(peer, blob);                                // blob = that peer's transport->address()
//   Region heap = transport->register_memory({base, bytes});       // may throw FabricError
//   RemoteRegion theirs = transport->add_remote(peer, key);        // key = that peer's transport->region_key(heap)
//
// *Every* peer that will write here must be connected before it writes: some providers drop RMA from an address that
// the target has not inserted.
//
// Data path rules
// - Nothing is ordered: not writes among themselves, not messages after writes, not across rails.
// - A post answers `again` when a queue is full: poll(), then try again. Nothing was sent.
// - poll() also drives progress of operations that peers started: a target must keep calling it.
// - A post or poll never throws and never blocks. After `error`, last_error() names the rejected operation and the
// reason. - Each cookie comes back exactly once, as `done` or as `failed`, unless it is kSilent: then only a failure is
// reported.
//
// Threads: a Transport belongs to one thread at a time (FI_THREAD_DOMAIN). Several proxy threads use one Transport
// each.
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn::fabric {

// Set-up failed: the message names the step, its place (provider, interface, rank) and the remedy.
class FabricError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

enum class Post : uint8_t { ok, again, error };

// Cookie of an operation whose success need not be reported.
constexpr uint64_t kSilent = ~0ull;

// Index of a local region, or of one peer's region; the same for all rails.
using Region = int32_t;
using RemoteRegion = int32_t;

struct Memory {
  void* base = nullptr;
  uint64_t bytes = 0;
  enum Kind : uint8_t { host, cuda } kind = host;
  int device = 0; // CUDA device ordinal of `cuda` memory
};

// Fields unused by a kind keep their values.
struct Event {
  enum Kind : uint8_t {
    done,      // `cookie` is complete: its source may be reused, and see Properties::delivery_complete
    immediate, // a peer's write with `imm` has arrived, and its data with it
    message,   // a peer's message: `data`, `bytes`; valid until the next poll()
    failed,    // `cookie` (kSilent if unknown) failed with libfabric's `code`; `text` is valid until the next poll()
  };
  Kind kind;
  int32_t peer; // of the operation or the sender; -1 when the network does not tell (always so for immediates)
  int32_t rail;
  uint32_t imm;
  uint64_t cookie;
  const void* data; // message: its payload
  uint64_t bytes;   // message, receive: payload bytes
  int32_t code;
  const char* text;
};

// Whether a failure's code looks like an ended process; other codes are failures of the network.
inline bool is_peer_lost(int code) {
  for (int gone :
       {ECONNRESET, ECONNABORTED, ECONNREFUSED, ENOTCONN, EPIPE, ESHUTDOWN, EHOSTUNREACH, EHOSTDOWN, ECANCELED})
    if (code == gone) return true;
  return false;
}

// Constant once the transport exists.
struct Properties {
  std::string provider;  // as libfabric names it: "efa", "tcp;ofi_rxm", …; "chaos+…" when wrapped
  std::string version;   // libfabric's run-time version, e.g. "2.5.1"
  std::string library;   // the file it was loaded from
  std::string interface; // domains of the rails, comma-separated
  int rails = 0;
  uint64_t max_write = 0;         // largest post_write/post_read in bytes
  uint64_t max_send = 0;          // largest post_send/post_receive in bytes
  uint32_t max_message = 0;       // largest post_message in bytes
  uint32_t inject_bytes = 0;      // sources up to this size are copied when posted
  uint32_t depth = 0;             // operations that one rail takes before it answers `again`
  double link_gbps = 0;           // total speed of the rails' NICs in 10^9 bits/s; 0 if unknown
  uint32_t immediates = 4096;     // that peers may send to one rail before it is polled
  int imm_bits = 32;              // low bits of an immediate that arrive; the others must be 0
  bool device_memory = false;     // `cuda` regions can be registered; otherwise stage through pinned host memory
  bool delivery_complete = false; // `done` of a write means: its data are at the target, not merely in flight
  bool ordered_messages = false;  // messages and sends to one peer over one rail arrive in order
  bool emulated_write = false;    // the provider emulates RDMA writes by copies at the target
  bool remote_progress = true;    // the target must poll() for writes into it to complete
  bool doorbells = false;         // posts that follow one another cost less with Copy::more
};

class Transport {
public:
  // Only while idle(), and while no peer reads or writes here: libfabric 1.17 crashes when an endpoint closes with
  // operations in flight. Leave a transport that is not idle to the end of the process, after abandon().
  virtual ~Transport() = default;

  virtual const Properties& properties() const = 0;

  // --- set-up: may throw FabricError -------------------------------------------------------------------------------
  // This process's addresses, to be handed to the peers as opaque bytes.
  virtual std::string address() const = 0;
  virtual void connect(int peer, const std::string& address) = 0;

  // Registers memory for local and remote use on all rails.
  virtual Region register_memory(const Memory& memory) = 0;
  virtual void release_memory(Region region) = 0;
  virtual std::string region_key(Region region) const = 0;
  virtual RemoteRegion add_remote(int peer, const std::string& key) = 0;

  // --- data path: no exceptions ------------------------------------------------------------------------------------
  // Offsets count bytes from the region's base on both sides; ranges outside a region are rejected.
  struct Copy {
    int rail;
    int peer;
    Region local;
    RemoteRegion remote;
    uint64_t local_offset;
    uint64_t remote_offset;
    uint64_t bytes;
    uint64_t cookie;
    bool has_imm; // writes only: raise an `immediate` event at the target
    bool more;    // another post to this rail follows at once: the doorbell may wait (FI_MORE)
    uint32_t imm;
    bool source_only = false; // writes: `done` need only mean that the source may be reused
  };
  virtual Post post_write(const Copy& copy) = 0;
  virtual Post post_read(const Copy& copy) = 0;

  // A small message, copied: `data` may be reused on return. At most Properties::max_message bytes.
  virtual Post post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) = 0;

  // Two-sided transfers from and into registered memory; only with TransportOptions::message_buffers == 0, because
  // receives are untagged. A receive completes as `done` with `bytes` set.
  virtual Post post_send(int rail, int peer, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) = 0;
  virtual Post post_receive(int rail, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) = 0;

  // Fills at most `capacity` events, from all rails in turn; returns their number.
  virtual int poll(Event* events, int capacity) = 0;

  // Whether no operation posted here is in flight, silent ones included. Data that the network has copied are not
  // counted.
  virtual bool idle() const = 0;

  // The peers are lost: removes objects that would outlive this process, and leftovers of peers on this host. No peer
  // can connect any more; existing connections stay.
  virtual void abandon() {}

  // Messages dropped because their sender did not know this transport's token: it had no address() from us.
  virtual uint64_t rejected_messages() const = 0;

  // Failed packets of the network's own, whose target is unknown: the operations that needed them fail separately, or
  // were void. `last`: the reason of the latest one, if any since the last call.
  virtual uint64_t internal_failures(std::string* last) {
    (void)last;
    return 0;
  }

  // Why the last post answered `error`. Valid until the next post.
  virtual const char* last_error() const = 0;
};

struct TransportOptions {
  int rank = 0;         // this process among the peers: sent to the receivers of its messages
  std::string provider; // "" = TSN_PROVIDER, or else the best offer; otherwise exactly this one
  std::string
      interface; // "" = TSN_FABRIC_INTERFACE, or else loopback on one host; a domain or interface name, comma-separated
  bool multi_host = false;        // peers on other hosts: loopback and shared memory are useless
  std::string address;            // this host's address towards the others: software providers prefer its interface
  bool one_sided = true;          // needs RMA with immediates; false: two-sided transfers only
  bool device_memory = false;     // prefer providers that reach GPU memory
  std::string gpu_pci;            // "0000:3b:00.0": prefer the NICs nearest to it; "" = no preference
  int rails = 0;                  // 0 = one per nearest NIC; n = exactly n, NICs being used more than once if need be
  int max_rails = 4;              // limit when rails is 0
  uint32_t depth = 512;           // outstanding operations per rail; lowered to the provider's limit
  uint32_t message_bytes = 256;   // largest message
  uint32_t message_buffers = 256; // receives kept posted per rail for messages; 0: the caller posts its own
  uint32_t immediates = 4096;     // that peers may send to one rail before it is polled
  bool delivery_complete = true;  // request it if offered
  std::string library;            // file of libfabric.so.1; "" = search (see provider.h)
  std::string library_fallback;   // tried last: the one inside the mpich wheel, which only Python can find
  std::string chaos;              // "" = TSN_CHAOS, "off" = none, or "seed=7,reorder=0.3,…" (see chaos.h)
};

// libfabric's transport, wrapped in the chaos transport on request. Throws FabricError.
std::unique_ptr<Transport> make_transport(const TransportOptions& options);

} // namespace tsn::fabric
