// What the fabric benchmarks share: a transport with a data buffer, a meeting point with each peer, and waits that end.
//
// Peers meet by writing sequence numbers into each other's control page, so that no process needs to leave its polling
// loop: a target must poll for the initiator's writes to finish.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

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
  // Hands out what has happened; throws FabricError on a failed operation. Yields the processor after a while without
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

} // namespace tsn::bench
