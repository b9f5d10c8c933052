#include "tilescale_net/csrc/testing/null_transport.h"

#include "tilescale_net/csrc/proxy/wire.h"

namespace tsn::testing {

using namespace fabric;
using namespace proxy;

namespace {

class NullTransport final : public Transport {
public:
  explicit NullTransport(const TransportOptions& o) {
    properties_.provider = "null";
    properties_.version = properties_.library = properties_.interface = "none";
    properties_.rails = std::max(1, o.rails);
    properties_.max_write = properties_.max_send = 1ull << 40;
    properties_.max_message = o.message_bytes;
    properties_.depth = o.depth;
    properties_.immediates = o.immediates;
    properties_.delivery_complete = true;
    properties_.device_memory = true;
    done_.reserve((size_t)properties_.depth * (size_t)properties_.rails);
  }

  const Properties& properties() const override { return properties_; }
  std::string address() const override { return "null"; }
  void connect(int, const std::string&) override {}
  Region register_memory(const Memory&) override { return 0; }
  void release_memory(Region) override {}
  std::string region_key(Region) const override { return "null"; }
  RemoteRegion add_remote(int, const std::string&) override { return 0; }

  Post post_write(const Copy& copy) override {
    const Post post = take(copy.cookie);
    if (post != Post::ok || !copy.has_imm) return post;
    AckRecord& ack = acks_[copy.peer];
    ack.type = RecordType::ack;
    if (++ack.chunks % 1024 == 0) owed_[copy.peer] = true;
    return post;
  }
  Post post_read(const Copy& copy) override { return take(copy.cookie); }
  Post post_send(int, int, Region, uint64_t, uint64_t, uint64_t cookie) override { return take(cookie); }
  Post post_receive(int, Region, uint64_t, uint64_t, uint64_t cookie) override { return take(cookie); }

  Post post_message(int, int peer, const void* data, uint32_t bytes, uint64_t cookie) override {
    AckRecord& ack = acks_[peer];
    for (uint32_t at = 0; at < bytes;) {
      const char* record = static_cast<const char*>(data) + at;
      if ((RecordType)record[0] == RecordType::mark) {
        MarkRecord m;
        std::memcpy(&m, record, sizeof m);
        at += sizeof m;
        ack.type = RecordType::ack;
        ack.marks = m.sequence + 1;
        // Groups are complete as soon as their sizes have arrived.
        if (m.count) ack.groups = m.group + 1;
        else if (m.closed_count) ack.groups = m.closed_group + 1;
        owed_[peer] = true;
      } else if ((RecordType)record[0] == RecordType::value) {
        ValueRecord v;
        std::memcpy(&v, record, sizeof v);
        at += (uint32_t)sizeof v + padded(v.bytes);
      } else {
        break;
      }
    }
    if (cookie != kSilent) return take(cookie);
    return Post::ok;
  }

  int poll(Event* events, int capacity) override {
    int n = 0;
    while (n < capacity && !done_.empty()) {
      events[n] = Event{Event::done, -1, 0, 0, done_.back(), nullptr, 0, 0, nullptr};
      done_.pop_back();
      n++;
    }
    for (auto it = owed_.begin(); it != owed_.end() && n < capacity; it = owed_.erase(it))
      events[n++] = Event{Event::message, it->first, 0, 0, kSilent, &acks_[it->first], sizeof(AckRecord), 0, nullptr};
    return n;
  }
  uint64_t rejected_messages() const override { return 0; }
  bool idle() const override { return done_.empty() && owed_.empty(); }
  const char* last_error() const override { return ""; }

private:
  Post take(uint64_t cookie) {
    if (done_.size() == done_.capacity()) return Post::again;
    done_.push_back(cookie);
    return Post::ok;
  }

  Properties properties_;
  std::vector<uint64_t> done_;
  std::map<int, AckRecord> acks_;
  std::map<int, bool> owed_;
};

} // namespace

std::unique_ptr<Transport> make_null(const TransportOptions& options) {
  return std::make_unique<NullTransport>(options);
}

} // namespace tsn::testing
