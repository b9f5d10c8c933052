// A transport between PEs of one process, for tests: writes are copies, events go through a locked inbox.
//
// It delivers in order; the chaos transport around it does not.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tsn::fabric {

class LoopbackHub {
public:
  struct Arrival {
    Event event;
    std::string payload;
  };
  struct Endpoint {
    std::mutex mutex;
    std::deque<Arrival> inbox;
  };
  int add() {
    std::lock_guard<std::mutex> lock(mutex_);
    endpoints_.push_back(std::make_unique<Endpoint>());
    return (int)endpoints_.size() - 1;
  }
  Endpoint& at(int i) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *endpoints_[(size_t)i];
  }

private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

class Loopback final : public Transport {
public:
  Loopback(std::shared_ptr<LoopbackHub> hub, const TransportOptions& o) : hub_(std::move(hub)), rank_(o.rank) {
    self_ = hub_->add();
    properties_.provider = "loopback";
    properties_.rails = std::max(1, o.rails);
    properties_.max_write = properties_.max_send = 1ull << 40;
    properties_.max_message = o.message_bytes;
    properties_.depth = o.depth;
    properties_.immediates = o.immediates;
    properties_.delivery_complete = o.delivery_complete;
    properties_.device_memory = o.device_memory;
  }

  const Properties& properties() const override { return properties_; }
  std::string address() const override { return std::to_string(self_); }
  void connect(int peer, const std::string& address) override {
    if (peers_.size() <= (size_t)peer) peers_.resize((size_t)peer + 1, -1);
    const bool number = !address.empty() && address.find_first_not_of("0123456789") == std::string::npos;
    if (!number || address.size() > 6) throw FabricError("loopback: an address that is none");
    peers_[(size_t)peer] = std::stoi(address);
  }
  Region register_memory(const Memory& m) override {
    regions_.push_back(m);
    return (Region)regions_.size() - 1;
  }
  void release_memory(Region) override {}
  std::string region_key(Region r) const override {
    const Memory& m = regions_[(size_t)r];
    return std::string(reinterpret_cast<const char*>(&m), sizeof m);
  }
  RemoteRegion add_remote(int, const std::string& key) override {
    Memory m;
    if (key.size() != sizeof m) throw FabricError("loopback: a key that is none");
    std::memcpy(&m, key.data(), sizeof m);
    remotes_.push_back(m);
    return (RemoteRegion)remotes_.size() - 1;
  }

  Post post_write(const Copy& c) override { return copy(c, true); }
  Post post_read(const Copy& c) override { return copy(c, false); }
  Post post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) override {
    if (bytes > properties_.max_message) return refuse("message too long");
    deliver(peer, {Event::message, rank_, rail, 0, kSilent, nullptr, bytes, 0, nullptr},
            std::string(static_cast<const char*>(data), bytes));
    if (cookie != kSilent) done(rail, peer, cookie);
    return Post::ok;
  }
  Post post_send(int, int, Region, uint64_t, uint64_t, uint64_t) override { return refuse("not here"); }
  Post post_receive(int, Region, uint64_t, uint64_t, uint64_t) override { return refuse("not here"); }

  int poll(Event* events, int capacity) override {
    current_.clear();
    LoopbackHub::Endpoint& mine = hub_->at(self_);
    std::lock_guard<std::mutex> lock(mine.mutex);
    int n = 0;
    for (; n < capacity && !mine.inbox.empty(); mine.inbox.pop_front()) {
      current_.push_back(std::move(mine.inbox.front()));
      events[n] = current_.back().event;
      events[n].data = current_.back().payload.data();
      outstanding_ -= events[n].kind == Event::done;
      n++;
    }
    return n;
  }
  uint64_t rejected_messages() const override { return 0; }
  bool idle() const override { return outstanding_ == 0; }
  const char* last_error() const override { return error_.c_str(); }

private:
  Post refuse(const char* what) {
    error_ = what;
    return Post::error;
  }
  Post copy(const Copy& c, bool write) {
    const Memory &local = regions_[(size_t)c.local], &remote = remotes_[(size_t)c.remote];
    if (c.local_offset + c.bytes > local.bytes || c.remote_offset + c.bytes > remote.bytes)
      return refuse("out of the region");
    if (c.imm >> properties_.imm_bits / 2 >> (properties_.imm_bits + 1) / 2) return refuse("immediate too wide");
    if (outstanding_ >= properties_.depth) return Post::again;
    char* here = static_cast<char*>(local.base) + c.local_offset;
    char* there = static_cast<char*>(remote.base) + c.remote_offset;
    if (write) std::memcpy(there, here, c.bytes);
    else std::memcpy(here, there, c.bytes);
    if (c.has_imm) deliver(c.peer, {Event::immediate, -1, c.rail, c.imm, kSilent, nullptr, 0, 0, nullptr}, "");
    if (c.cookie != kSilent) done(c.rail, c.peer, c.cookie);
    return Post::ok;
  }
  void deliver(int peer, const Event& event, std::string payload) {
    push(peers_[(size_t)peer], event, std::move(payload));
  }
  void done(int rail, int peer, uint64_t cookie) {
    outstanding_++;
    push(self_, {Event::done, peer, rail, 0, cookie, nullptr, 0, 0, nullptr}, "");
  }
  void push(int endpoint, const Event& event, std::string payload) {
    LoopbackHub::Endpoint& to = hub_->at(endpoint);
    std::lock_guard<std::mutex> lock(to.mutex);
    to.inbox.push_back({event, std::move(payload)});
  }

  std::shared_ptr<LoopbackHub> hub_;
  const int rank_;
  int self_;
  Properties properties_;
  std::vector<int> peers_;
  std::vector<Memory> regions_, remotes_;
  std::deque<LoopbackHub::Arrival> current_; // payloads stay until the next poll
  uint32_t outstanding_ = 0;
  std::string error_;
};

} // namespace tsn::fabric
