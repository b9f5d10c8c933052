// Shared parts of the fabric benchmarks: a transport with a data buffer, a meeting point with each peer, and bounded
// waits; and the timed loops of two processes over one session each: bandwidth by perftest's definitions, and a
// two-sided ping-pong.
//
// Peers meet by writing sequence numbers into each other's control page, so that no process needs to leave its polling
// loop: a target must poll for the initiator's writes to finish.
#pragma once

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::bench {

using namespace fabric;

class Session {
public:
  // `peers` counts all processes, this one included. `device_address` is GPU memory of `bytes` bytes to be used in
  // place of host memory, or 0. Throws FabricError.
  Session(const TransportOptions& options, int peers, uint64_t bytes, double timeout_s, uint64_t device_address = 0,
          int device = 0);
  ~Session();
  Session(const Session&) = delete;

  // --- set-up: hand address() to every peer that this process talks to, and call connect() with theirs ------------
  std::string address() const;
  void connect(int peer, const std::string& address);

  Transport& transport() { return *transport_; }
  Region region() const { return region_; }
  RemoteRegion remote(int peer) const { return remotes_.at(peer); }
  char* data() { return data_; } // host address of the buffer; null for GPU memory
  uint64_t bytes() const { return bytes_; }

  // --- events ------------------------------------------------------------------------------------------------------
  // Hands out events; throws FabricError on a failed operation. Yields the processor after a while without
  // events, and throws FabricError, with `doing` in its text, once nothing has happened for the session's time limit.
  // A process that only serves its peer (`passive`) sees no events; signs of life, which every process that polls gives
  // its peer once a second, count instead.
  int poll(Event* events, int capacity, const char* doing, int peer, bool passive = false);

  // --- meeting -----------------------------------------------------------------------------------------------------
  // Returns, with how many meetings there have been, when the peer has called it too.
  uint64_t sync(int peer);
  // Sends `peer` the number of messages that it gets after meeting number `meeting`; peer_count() returns the peer's
  // number, or -1. Calls `serve`, which has to poll, until the peer has the number: the peer may still be sending, and
  // where a message without a receive holds up everything behind it, the acknowledgement of this write is among that.
  void send_count(int peer, uint64_t meeting, uint64_t count, const std::function<void()>& serve);
  int64_t peer_count(int peer, uint64_t meeting) const;

  std::vector<uint64_t> receives_posted; // per rail, kept by the benchmarks: not yet used up by messages

private:
  struct alignas(64) ControlPage {
    enum Word { meeting, count, life }; // number of meetings; see send_count(); signs of life
    volatile uint64_t inbox[3];
    uint64_t outbox[3];
  };
  int fetch(Event* events, int capacity, const char* doing, int peer, bool passive);
  Post post_word(int peer, int word, uint64_t number, uint64_t cookie);
  void check_timeout(const char* doing, int peer, bool passive);
  void send_word(int peer, int word, uint64_t number);
  // Polls until `done()`; other events than our own are kept for the next poll().
  void wait(const std::function<bool()>& done, int peer);

  int self_, peers_;
  double timeout_s_;
  uint64_t bytes_;
  char* data_ = nullptr; // host mapping, when the buffer is host memory
  ControlPage* pages_ = nullptr;
  size_t mapped_bytes_ = 0, control_bytes_ = 0;
  std::unique_ptr<Transport> transport_; // goes before the memory that it has registered
  Region region_ = -1, control_ = -1;
  std::vector<RemoteRegion> remotes_, controls_;
  std::vector<uint64_t> numbers_;
  std::vector<Event> backlog_;                    // arrived during wait(): none of them points to data
  bool word_sent_ = false, sending_life_ = false; // the write has completed; a sign of life is on its way
  Clock::time_point last_event_, last_sign_;
  uint64_t polls_ = 0, busy_poll_ = 0, heard_life_ = 0; // busy_poll_: the last one that brought anything
};

// --- bandwidth of sends, writes and reads, one way or both, with perftest's knobs ---

enum class Transfer : uint8_t { send, write, read };

struct BandwidthOptions {
  Transfer operation = Transfer::write;
  uint64_t bytes = 65536;      // of one message
  uint64_t iterations = 1000;  // messages
  double duration_s = 0;       // above 0: this long, for any number of messages
  uint32_t tx_depth = 128;     // messages outstanding
  uint32_t rx_depth = 512;     // receives posted
  uint32_t post_list = 1;      // messages posted behind one doorbell; divides iterations
  uint32_t recv_post_list = 1; // receives posted at a time
  bool initiator = true;       // sends, writes or reads; otherwise it serves
  bool stamps = true;          // note the time of every post and completion, for the peak
};

struct BandwidthResult {
  uint64_t iterations = 0;
  double seconds = 0;             // first post to last completion
  double least_s_per_message = 0; // over any window of messages; NaN without stamps
};

// Both processes of a pair call it with equal options but `initiator`; both may be initiators. Message i goes over rail
// i % rails. The session's buffer sends from its first half and receives into its second. Returns zeros
// at a process that is no initiator.
BandwidthResult run_bandwidth(Session& session, int peer, const BandwidthOptions& options);

// A pattern of distinct words, and whether memory holds it.
void fill_pattern(char* data, uint64_t bytes, uint64_t seed);
bool holds_pattern(const char* data, uint64_t bytes, uint64_t seed);

// --- ping-pong: messages of any size there and back, in chunks, several of them in flight ---

struct PingPongOptions {
  uint64_t bytes = 8;       // of one message
  uint64_t chunk = 1 << 20; // largest transfer; the provider may lower it
  uint64_t iterations = 10; // timed round trips
  uint64_t warmup = 2;      // untimed ones before
  uint32_t window = 64;     // chunks in flight each way
  bool starter = true;      // sends first; exactly one of the pair does
  bool verify = true;       // the starter compares replies with its messages
  // GPU memory of the session's size that messages start from and arrive in; 0: host memory. Where the session has
  // registered it, it is used directly, otherwise the session's host memory is the staging buffer.
  uint64_t device_address = 0;
  int device = 0;
};

// Bytes that a session needs for messages of up to `bytes`: outgoing, and two for incoming, because the echo of one
// message goes out from where it came in while the next one may arrive. Whole chunks, because chunks may arrive in any
// order.
inline uint64_t ping_pong_part(uint64_t bytes, uint64_t chunk) {
  const uint64_t whole = bytes <= chunk ? bytes : (bytes + chunk - 1) / chunk * chunk;
  return (whole + 4095) / 4096 * 4096;
}
inline uint64_t ping_pong_bytes(uint64_t bytes, uint64_t chunk) { return 3 * ping_pong_part(bytes, chunk); }

// Seconds of each timed round trip at the starter, nothing at the other. Uses rail 0 alone. The transport must leave
// receives to its caller (message_buffers = 0). Throws FabricError, also when data came back wrong.
std::vector<double> run_ping_pong(Session& session, int peer, const PingPongOptions& options);

// Bandwidth from time stamps, as perftest defines it: the least time per message over all windows of consecutive
// messages: min over i <= j of (completed[j] - posted[i]) / (j - i + 1), in the stamps' unit. perftest compares all
// pairs; this finds the same minimum in a few linear passes (Dinkelbach's method: for a candidate ratio, find the
// window that beats it most). NaN when there are no stamps.
inline double least_time_per_message(const std::vector<uint64_t>& posted, const std::vector<uint64_t>& completed) {
  const size_t n = std::min(posted.size(), completed.size());
  if (!n) return std::numeric_limits<double>::quiet_NaN();
  const uint64_t zero = posted[0];
  double best = static_cast<double>(completed[0] - zero);
  for (;;) {
    // A window (i, j) beats `best` where (completed[j] - best * (j + 1)) - (posted[i] - best * i) < 0.
    double highest = -std::numeric_limits<double>::infinity(), lowest = 0;
    size_t start = 0, from = 0, to = n;
    for (size_t j = 0; j < n; ++j) {
      const double open = static_cast<double>(posted[j] - zero) - best * static_cast<double>(j);
      if (open > highest) {
        highest = open;
        start = j;
      }
      const double gain = static_cast<double>(completed[j] - zero) - best * static_cast<double>(j + 1) - highest;
      if (gain < lowest) {
        lowest = gain;
        from = start;
        to = j;
      }
    }
    if (to == n) return best;
    const double ratio = static_cast<double>(completed[to] - posted[from]) / static_cast<double>(to - from + 1);
    if (!(ratio < best)) return best; // no further progress within rounding
    best = ratio;
  }
}

} // namespace tsn::bench
