#include "tilescale_net/csrc/bench/bare_writer.h"

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include "tilescale_net/csrc/proxy/null_transport.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace tsn::bench {
namespace {
constexpr uint32_t kBlobMagic = 0x74736e62;
} // namespace

struct BareWriter::Buffer {
  explicit Buffer(uint64_t bytes) : memory(bytes, false) {}
  cuda::PinnedBlock memory;
};

BareWriter::BareWriter(const BareWriterOptions& options) : options_(options), events_(128) {
  transport_ = proxy::make_transport_or_null(options_.transport);
  options_.chunk_bytes = std::min(options_.chunk_bytes, transport_->properties().max_write);
  if (!options_.base) {
    buffer_ = std::make_unique<Buffer>(options_.bytes);
    options_.base = reinterpret_cast<uint64_t>(buffer_->memory.data());
    std::memset(buffer_->memory.data(), 1, options_.bytes); // page faults belong to no measured time
  }
  if (options_.staged || (options_.cuda && !transport_->properties().device_memory)) {
    staging_ = std::make_unique<BareStaging>(transport_.get(), options_.base, options_.cuda, options_.device,
                                             options_.chunk_bytes, options_.window);
    region_ = staging_->receive_region();
  } else {
    region_ = transport_->register_memory({reinterpret_cast<void*>(options_.base), options_.bytes,
                                           options_.cuda ? Memory::cuda : Memory::host, options_.device});
  }
  out_.resize((size_t)transport_->properties().rails);
}

BareWriter::~BareWriter() { transport_.reset(); }

std::string BareWriter::address() const {
  BlobWriter w(kBlobMagic);
  w.text(transport_->address());
  w.text(transport_->region_key(region_));
  return w.take();
}

void BareWriter::connect(int peer, const std::string& address) {
  BlobReader r(address, kBlobMagic, "the address of peer " + std::to_string(peer));
  transport_->connect(peer, r.text());
  if (remote_.size() <= (size_t)peer) remote_.resize((size_t)peer + 1, -1);
  remote_[(size_t)peer] = transport_->add_remote(peer, r.text());
  if (staging_) staging_->set_peer(remote_[(size_t)peer]);
}

void BareWriter::fail(const std::string& what) {
  throw FabricError("rank " + std::to_string(options_.transport.rank) + ": bare writer: " + what);
}

int BareWriter::poll() {
  const int n = transport_->poll(events_.data(), (int)events_.size());
  for (int i = 0; i < n; i++) {
    const Event& e = events_[(size_t)i];
    if (e.kind == Event::done) completed_++, out_[e.cookie >> 40] -= e.cookie & ((1ull << 40) - 1);
    else if (e.kind == Event::immediate) {
      immediates_++;
      if (staging_) arrivals_.push_back(e.imm);
    } else if (e.kind == Event::message && e.bytes == sizeof(uint32_t)) {
      uint32_t slot;
      std::memcpy(&slot, e.data, sizeof slot);
      staging_->given_back(slot);
    } else if (e.kind == Event::message) finished_ = true;
    else fail(std::string("an operation failed: ") + (e.text ? e.text : "no reason given"));
  }
  idle_ = n ? 0 : idle_ + 1;
  if (!options_.dedicated && idle_ > 50) sched_yield();
  return n;
}

void BareWriter::post(const Transport::Copy& copy) {
  const uint64_t start = now_ns();
  for (;;) {
    const Post post = transport_->post_write(copy);
    if (post == Post::ok) break;
    if (post == Post::error) fail(transport_->last_error());
    if (poll() == 0 && now_ns() - start > (uint64_t)(options_.timeout * 1e9))
      fail("peer " + std::to_string(copy.peer) + " took nothing for " + std::to_string(options_.timeout) + " s");
  }
  posted_++;
  out_[(size_t)copy.rail] += copy.bytes;
}

double BareWriter::write(int peer, uint64_t bytes, int count, bool blocking, int from) {
  if (bytes > options_.bytes) fail(std::to_string(bytes) + " bytes do not fit the buffer");
  if (staging_) return write_staged(peer, bytes, count, blocking, from);
  const uint64_t rails = out_.size();
  uint64_t chunk = options_.chunk_bytes;
  if (rails > 1) chunk = std::min(chunk, std::max<uint64_t>(65536, ((bytes + rails - 1) / rails + 4095) & ~4095ull));
  uint64_t last = now_ns();
  const uint64_t start = last;
  auto wait = [&](uint64_t outstanding) {
    while (posted_ - completed_ > outstanding) {
      if (poll()) last = now_ns();
      else if (now_ns() - last > (uint64_t)(options_.timeout * 1e9))
        fail("peer " + std::to_string(peer) + " completed nothing for " + std::to_string(options_.timeout) + " s");
    }
  };
  for (int i = 0; i < count; i++) {
    for (uint64_t at = 0; at < bytes; at += chunk) {
      wait(options_.window - 1);
      const auto rail = (uint64_t)(std::min_element(out_.begin(), out_.end()) - out_.begin());
      Transport::Copy c = {};
      c.rail = (int)rail;
      c.peer = peer;
      c.local = region_;
      c.remote = remote_[(size_t)peer];
      c.local_offset = c.remote_offset = at;
      c.bytes = std::min(chunk, bytes - at);
      c.cookie = rail << 40 | c.bytes;
      post(c);
    }
    if (blocking) wait(0);
  }
  wait(0);
  return (double)(now_ns() - start) * 1e-9;
}

double BareWriter::exchange(int peer, uint64_t bytes, int count, bool first) {
  if (bytes > options_.bytes) fail(std::to_string(bytes) + " bytes do not fit the buffer");
  if (staging_) return exchange_staged(peer, bytes, count, first);
  Transport::Copy c = {};
  c.peer = peer;
  c.local = region_;
  c.remote = remote_[(size_t)peer];
  c.bytes = c.cookie = bytes;
  c.has_imm = true;
  const uint64_t start = now_ns();
  for (int i = 0; i < count; i++) {
    if (first) post(c);
    const uint64_t begun = now_ns();
    while (immediates_ == seen_)
      if (!poll() && now_ns() - begun > (uint64_t)(options_.timeout * 1e9))
        fail("peer " + std::to_string(peer) + " did not answer for " + std::to_string(options_.timeout) + " s");
    seen_++;
    if (!first) post(c);
  }
  const double seconds = (double)(now_ns() - start) * 1e-9;
  while (posted_ != completed_) poll();
  return seconds;
}

// To be called after polls without anything new: gives up when that has lasted too long.
void BareWriter::check_timeout(uint64_t* since, const std::string& what) {
  const uint64_t now = now_ns();
  if (*since == 0) *since = now;
  else if (now - *since > (uint64_t)(options_.timeout * 1e9))
    fail(what + " for " + std::to_string(options_.timeout) + " s");
}

// Writes the pieces that have been copied out to their slots.
void BareWriter::post_staged(int peer) {
  staging_->post_ready(peer, out_.size(), [&](Transport::Copy c) {
    c.cookie = (uint64_t)c.rail << 40 | c.bytes;
    post(c);
  });
}

// Notifies the peer that its piece is in place.
void BareWriter::return_slot(int peer, uint32_t slot) {
  uint64_t since = 0;
  while (transport_->post_message(0, peer, &slot, sizeof slot, kSilent) == Post::again)
    if (!poll()) check_timeout(&since, "peer " + std::to_string(peer) + " took no message");
}

double BareWriter::write_staged(int peer, uint64_t bytes, int count, bool blocking, int from) {
  const uint64_t start = now_ns();
  const std::string silence = "peer " + std::to_string(peer) + " gave no slot back";
  uint64_t since = 0;
  // One turn: posts all that can be posted, and takes completions.
  auto turn = [&] {
    post_staged(peer);
    if (from >= 0) land(from);
    if (poll()) since = 0;
    else check_timeout(&since, silence);
  };
  for (int i = 0; i < count; i++) {
    for (uint64_t at = 0; at < bytes; at += options_.chunk_bytes)
      while (!staging_->begin(at, std::min(options_.chunk_bytes, bytes - at))) turn();
    while (blocking && staging_->outstanding()) turn();
  }
  while (staging_->outstanding()) turn();
  return (double)(now_ns() - start) * 1e-9;
}

// Copies in what has arrived, and gives slots back whose data are in place.
void BareWriter::land(int peer) {
  for (uint32_t slot : arrivals_) staging_->arrived(slot);
  arrivals_.clear();
  uint32_t slot;
  while (staging_->landed(&slot)) return_slot(peer, slot);
}

double BareWriter::exchange_staged(int peer, uint64_t bytes, int count, bool first) {
  if (bytes > options_.chunk_bytes) fail(std::to_string(bytes) + " bytes do not fit a slot");
  uint64_t since = 0;
  const std::string silence = "peer " + std::to_string(peer) + " did not answer";
  auto send = [&] {
    while (!staging_->begin(0, bytes)) poll(), check_timeout(&since, silence);
    const uint64_t before = posted_;
    while (posted_ == before) post_staged(peer);
    since = 0;
  };
  // The piece is in place, in the memory itself, before the answer leaves; its slot is given back after that.
  uint32_t slot = 0;
  auto receive = [&] {
    while (arrivals_.empty()) poll() ? void(since = 0) : check_timeout(&since, silence);
    staging_->arrived(arrivals_.front());
    arrivals_.erase(arrivals_.begin());
    while (!staging_->landed(&slot)) continue;
    since = 0;
  };
  const uint64_t start = now_ns();
  for (int i = 0; i < count; i++) {
    if (first) send();
    receive();
    if (!first) send();
    return_slot(peer, slot);
  }
  const double seconds = (double)(now_ns() - start) * 1e-9;
  while (staging_->outstanding() || posted_ != completed_) poll(), check_timeout(&since, silence);
  return seconds;
}

void BareWriter::serve(int peer) {
  // Writes without immediates are silent here, so only a long silence shows that the writer is gone.
  const uint64_t end = now_ns() + (uint64_t)(60 * options_.timeout * 1e9);
  while (!finished_) {
    poll();
    if (staging_) land(peer);
    if (now_ns() > end) fail("peer " + std::to_string(peer) + " went away without saying so");
  }
  finished_ = false;
}

void BareWriter::finish(int peer) {
  const char done[8] = "done";
  while (transport_->post_message(0, peer, done, sizeof done, kSilent) == Post::again) poll();
  const uint64_t end = now_ns() + 20000000; // let it leave
  while (now_ns() < end) poll();
}

} // namespace tsn::bench
