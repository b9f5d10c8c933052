#include "benchmark/native/loops.h"

#include <algorithm>
#include <cstring>

namespace tsn::bench {
namespace {

constexpr uint64_t kReceive = 1ull << 61; // cookie of receives; of everything else 0
const char* const kDoing[] = {"sending", "writing", "reading"};

class BandwidthLoop {
public:
  BandwidthLoop(Session& session, int peer, const BandwidthOptions& options)
      : session_(session), transport_(session.transport()), peer_(peer), o_(options),
        rails_(transport_.properties().rails), doing_(kDoing[static_cast<int>(options.operation)]),
        stamps_(options.stamps && options.initiator && options.duration_s <= 0) {
    const uint64_t available = static_cast<uint64_t>(transport_.properties().depth) * rails_;
    depth_ = std::max<uint64_t>(std::min<uint64_t>(o_.tx_depth, available), o_.post_list);
    copy_.peer = peer;
    copy_.local = session.region();
    copy_.remote = session.remote(peer);
    copy_.bytes = o_.bytes;
    // A write fills the peer's incoming half, a read our own.
    (o_.operation == Transfer::write ? copy_.remote_offset : copy_.local_offset) =
        o_.operation == Transfer::send ? 0 : session.bytes() / 2;
    if (stamps_) {
      posted_.reserve(o_.iterations);
      completed_.reserve(o_.iterations);
    }
  }

  BandwidthResult run() {
    if (o_.operation == Transfer::send) post_receives();
    const uint64_t meeting = session_.sync(peer_);
    if (o_.initiator) initiate();
    session_.send_count(peer_, meeting, sent_, [this] { drain(true); });
    // Serve until the peer has finished and everything that it sent is here.
    while (session_.peer_count(peer_, meeting) < 0 || !received_all(meeting)) drain(true);
    session_.sync(peer_);
    return result_;
  }

private:
  void initiate() {
    const auto start = Clock::now();
    const uint64_t first = ticks();
    bool over = false;
    for (uint64_t turn = 0; done_ < sent_ || !over; ++turn) {
      if (o_.duration_s > 0) over = over || (turn % 64 == 0 && seconds_since(start) >= o_.duration_s);
      else over = sent_ >= o_.iterations;
      while (!over && sent_ - done_ + o_.post_list <= depth_) {
        const uint64_t before = sent_;
        post_list();
        over = o_.duration_s <= 0 && sent_ >= o_.iterations;
        if (sent_ - before < o_.post_list || o_.duration_s > 0) break;
      }
      drain();
    }
    result_.iterations = done_;
    result_.seconds = static_cast<double>(last_ - first) / ticks_per_second();
    result_.least_s_per_message = least_time_per_message(posted_, completed_) / ticks_per_second();
  }

  // Posts one list, or what is left of it when the transport answered `again` in its middle before.
  void post_list() {
    const uint64_t now = stamps_ ? ticks() : 0;
    uint64_t left = o_.post_list - sent_ % o_.post_list;
    if (o_.duration_s <= 0) left = std::min(left, o_.iterations - sent_);
    for (; left; --left) {
      if (rails_ > 1) copy_.rail = static_cast<int>(sent_ % rails_);
      if (o_.post_list > 1) copy_.more = left > static_cast<uint64_t>(rails_);
      Post post;
      switch (o_.operation) {
      case Transfer::send:
        post = transport_.post_send(copy_.rail, peer_, copy_.local, 0, copy_.bytes, 0);
        break;
      case Transfer::write:
        post = transport_.post_write(copy_);
        break;
      default:
        post = transport_.post_read(copy_);
      }
      if (post == Post::again) return;
      if (post == Post::error) throw FabricError(transport_.last_error());
      ++sent_;
      if (stamps_) posted_.push_back(now);
    }
  }

  void drain(bool passive = false) {
    Event events[32];
    const int n = session_.poll(events, 32, doing_, peer_, passive);
    if (!n) return;
    uint64_t done = 0;
    for (int i = 0; i < n; ++i) {
      if (events[i].cookie != kReceive) {
        ++done;
        continue;
      }
      if (events[i].bytes != o_.bytes)
        throw FabricError("received " + std::to_string(events[i].bytes) + " bytes instead of " +
                          std::to_string(o_.bytes));
      ++received_;
      --session_.receives_posted[events[i].rail];
    }
    if (done) {
      done_ += done;
      last_ = ticks();
      if (stamps_) completed_.insert(completed_.end(), done, last_);
    }
    if (o_.operation == Transfer::send) post_receives();
  }

  // Keeps rx_depth receives posted, in batches. They take the whole incoming half, so that those left over serve larger
  // messages later.
  void post_receives() {
    const uint64_t half = session_.bytes() / 2, share = (o_.rx_depth + rails_ - 1) / rails_;
    for (int rail = 0; rail < rails_; ++rail) {
      uint64_t& posted = session_.receives_posted[rail];
      if (posted + std::min<uint64_t>(o_.recv_post_list, share) > share) continue;
      for (; posted < share; ++posted) {
        const Post post = transport_.post_receive(rail, session_.region(), half, half, kReceive);
        if (post == Post::again) break;
        if (post == Post::error) throw FabricError(transport_.last_error());
      }
    }
  }

  bool received_all(uint64_t meeting) {
    return o_.operation != Transfer::send || received_ == static_cast<uint64_t>(session_.peer_count(peer_, meeting));
  }

  Session& session_;
  Transport& transport_;
  const int peer_;
  const BandwidthOptions o_;
  const int rails_;
  const char* const doing_;
  const bool stamps_;
  uint64_t depth_ = 0, sent_ = 0, done_ = 0, received_ = 0, last_ = 0;
  Transport::Copy copy_ = {};
  std::vector<uint64_t> posted_, completed_;
  BandwidthResult result_;
};

// Splitmix64's finaliser (Steele, Lea, Flood 2014): neighbouring inputs give unrelated words.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

} // namespace

BandwidthResult run_bandwidth(Session& session, int peer, const BandwidthOptions& options) {
  return BandwidthLoop(session, peer, options).run();
}

void fill_pattern(char* data, uint64_t bytes, uint64_t seed) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = mix(seed << 40 ^ at);
    std::memcpy(data + at, &word, std::min<uint64_t>(8, bytes - at));
  }
}

bool holds_pattern(const char* data, uint64_t bytes, uint64_t seed) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = mix(seed << 40 ^ at);
    if (std::memcmp(data + at, &word, std::min<uint64_t>(8, bytes - at))) return false;
  }
  return true;
}

} // namespace tsn::bench
