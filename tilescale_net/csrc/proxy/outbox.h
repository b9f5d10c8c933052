// Records on their way to one peer, packed into as few messages as possible.
#pragma once

#include "tilescale_net/csrc/proxy/network.h"
#include "tilescale_net/csrc/proxy/ring.h"
#include "tilescale_net/csrc/proxy/stats.h"
#include "tilescale_net/csrc/proxy/wire.h"

#include <cstring>
#include <memory>

namespace tsn::proxy {

class Outbox {
public:
  void set_limit(uint32_t message_bytes) { limit_ = message_bytes & ~7u; }

  // Room for a record of `bytes` bytes, a multiple of 8; the caller fills it at once.
  char* append(uint32_t bytes) {
    if (messages_.empty() || messages_.back().bytes + bytes > limit_) {
      Message m;
      if (spare_.empty()) {
        m.data.reset(new char[limit_]);
      } else {
        m.data = std::move(spare_.back());
        spare_.pop_back();
      }
      messages_.push(std::move(m));
    }
    Message& m = messages_.back();
    char* place = m.data.get() + m.bytes;
    m.bytes += bytes;
    return place;
  }

  template <class Record>
  void append_record(const Record& record) {
    static_assert(sizeof(Record) % 8 == 0, "records are multiples of 8 bytes");
    std::memcpy(append(sizeof record), &record, sizeof record);
  }

  bool empty() const { return messages_.empty(); }
  size_t backlog() const { return messages_.size(); }

  // Posts messages until all are gone, or the transport takes no more.
  Post flush(Transport* transport, int rail, int peer, ProxyStats* stats) {
    while (!messages_.empty()) {
      Message& m = messages_.front();
      const Post post = transport->post_message(rail, peer, m.data.get(), m.bytes, kSilent);
      if (post != Post::ok) return post;
      stats->messages.add();
      m.bytes = 0;
      spare_.push_back(std::move(m.data));
      messages_.pop();
    }
    return Post::ok;
  }

private:
  struct Message {
    std::unique_ptr<char[]> data;
    uint32_t bytes = 0;
  };
  uint32_t limit_ = 256;
  Ring<Message> messages_;
  std::vector<std::unique_ptr<char[]>> spare_;
};

} // namespace tsn::proxy
