#include "benchmark/native/session.h"

#include <algorithm>
#include <cstddef>

#include <sched.h>
#include <sys/mman.h>

#include "tilescale_net/csrc/fabric/blob.h"

namespace tsn::bench {
namespace {

constexpr uint32_t kMagic = 0x54534e53; // "TSNS"
// Cookies of the writes that carry numbers; the benchmarks' own are smaller.
constexpr uint64_t kWord = 1ull << 62, kLife = kWord + 1;
// Polls without events after which the processor is offered to others, now and then.
constexpr int kIdlePolls = 2000;
// Polls after a meeting, so that the peer learns of it too.
constexpr int kLingeringPolls = 300;

char* map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED)
    throw FabricError("no memory for a buffer of " + std::to_string(bytes) + " bytes: choose smaller sizes");
  return static_cast<char*>(p);
}

} // namespace

Session::Session(const TransportOptions& options, int peers, uint64_t bytes, double timeout_s, uint64_t device_address,
                 int device)
    : self_(options.rank), peers_(peers), timeout_s_(timeout_s), bytes_(bytes), remotes_(peers, -1),
      controls_(peers, -1), numbers_(peers, 0), last_event_(Clock::now()) {
  transport_ = make_transport(options);
  receives_posted.assign(transport_->properties().rails, 0);
  control_bytes_ = sizeof(ControlPage) * static_cast<size_t>(peers);
  pages_ = reinterpret_cast<ControlPage*>(map_pages(control_bytes_));
  control_ = transport_->register_memory({pages_, control_bytes_, Memory::host, 0});
  if (device_address) {
    region_ = transport_->register_memory({reinterpret_cast<void*>(device_address), bytes, Memory::cuda, device});
  } else {
    mapped_bytes_ = bytes;
    data_ = map_pages(bytes);
    region_ = transport_->register_memory({data_, bytes, Memory::host, 0});
  }
}

Session::~Session() {
  transport_.reset();
  if (data_) munmap(data_, mapped_bytes_);
  if (pages_) munmap(pages_, control_bytes_);
}

std::string Session::address() const {
  BlobWriter blob(kMagic);
  blob.text(transport_->address());
  blob.text(transport_->region_key(region_));
  blob.text(transport_->region_key(control_));
  return blob.take();
}

void Session::connect(int peer, const std::string& address) {
  BlobReader blob(address, kMagic, "the address of rank " + std::to_string(peer));
  transport_->connect(peer, blob.text());
  remotes_.at(peer) = transport_->add_remote(peer, blob.text());
  controls_.at(peer) = transport_->add_remote(peer, blob.text());
}

// Now and then: a yield, a sign of life to the peer, and the time limit.
void Session::check_timeout(const char* doing, int peer, bool passive) {
  const bool idle = polls_ - busy_poll_ > kIdlePolls;
  if (idle) sched_yield();
  if (polls_ % 4096 && !(idle && polls_ % 256 == 0)) return;
  const auto now = Clock::now();
  ControlPage& page = pages_[peer];
  if (!sending_life_ && now - last_sign_ > std::chrono::seconds(1) && controls_[peer] >= 0) {
    last_sign_ = now;
    sending_life_ = post_word(peer, ControlPage::life, page.outbox[ControlPage::life] + 1, kLife) == Post::ok;
  }
  const uint64_t life = page.inbox[ControlPage::life];
  if (!idle || (passive && life != heard_life_)) last_event_ = now;
  heard_life_ = life;
  if (idle && std::chrono::duration<double>(now - last_event_).count() > timeout_s_)
    throw FabricError("rank " + std::to_string(self_) + ", " + doing + " with rank " + std::to_string(peer) +
                      " over provider '" + transport_->properties().provider + "': nothing has happened for " +
                      std::to_string(static_cast<int>(timeout_s_)) +
                      " s; that rank has ended, or the network between the two is broken");
}

int Session::fetch(Event* events, int capacity, const char* doing, int peer, bool passive) {
  const int got = transport_->poll(events, capacity);
  if (__builtin_expect(++polls_ % 64 == 0, 0)) check_timeout(doing, peer, passive);
  if (!got) return 0;
  busy_poll_ = polls_;
  int n = 0;
  for (int i = 0; i < got; ++i) {
    if (events[i].kind == Event::failed)
      throw FabricError("rank " + std::to_string(self_) + ", " + doing + " with rank " + std::to_string(peer) + ": " +
                        events[i].text);
    if (events[i].cookie == kWord) word_sent_ = true;
    else if (events[i].cookie == kLife) sending_life_ = false;
    else if (n++ != i) events[n - 1] = events[i];
  }
  return n;
}

int Session::poll(Event* events, int capacity, const char* doing, int peer, bool passive) {
  if (__builtin_expect(!backlog_.empty(), 0)) {
    const int n = std::min<int>(capacity, static_cast<int>(backlog_.size()));
    std::copy(backlog_.begin(), backlog_.begin() + n, events);
    backlog_.erase(backlog_.begin(), backlog_.begin() + n);
    return n;
  }
  return fetch(events, capacity, doing, peer, passive);
}

void Session::wait(const std::function<bool()>& done, int peer) {
  Event events[16];
  last_event_ = Clock::now();
  while (!done()) {
    const int n = fetch(events, 16, "meeting", peer, true);
    backlog_.insert(backlog_.end(), events, events + n);
  }
}

Post Session::post_word(int peer, int word, uint64_t number, uint64_t cookie) {
  pages_[peer].outbox[word] = number;
  Transport::Copy copy = {};
  copy.peer = peer;
  copy.local = control_;
  copy.remote = controls_.at(peer);
  copy.local_offset = static_cast<uint64_t>(peer) * sizeof(ControlPage) + offsetof(ControlPage, outbox) + word * 8;
  copy.remote_offset = static_cast<uint64_t>(self_) * sizeof(ControlPage) + offsetof(ControlPage, inbox) + word * 8;
  copy.bytes = sizeof(uint64_t);
  copy.cookie = cookie;
  return transport_->post_write(copy);
}

void Session::send_word(int peer, int word, uint64_t number) {
  word_sent_ = false;
  Post post = Post::again;
  wait([&] { return (post = post_word(peer, word, number, kWord)) != Post::again; }, peer);
  if (post == Post::error) throw FabricError(transport_->last_error());
  wait([&] { return word_sent_; }, peer); // the outbox may not change under the write
}

uint64_t Session::sync(int peer) {
  const uint64_t number = ++numbers_.at(peer);
  send_word(peer, ControlPage::meeting, number);
  wait([&] { return pages_[peer].inbox[ControlPage::meeting] >= number; }, peer);
  // The peer's number is here, but the peer waits until its write is complete: many providers complete it only while
  // this side polls, and the caller may stop polling now.
  int polls = 0;
  wait([&] { return ++polls > kLingeringPolls; }, peer);
  return number;
}

void Session::send_count(int peer, uint64_t meeting, uint64_t count, const std::function<void()>& serve) {
  word_sent_ = false;
  last_event_ = Clock::now();
  Post post;
  while ((post = post_word(peer, ControlPage::count, meeting << 40 | count, kWord)) == Post::again) serve();
  if (post == Post::error) throw FabricError(transport_->last_error());
  while (!word_sent_) serve();
}

int64_t Session::peer_count(int peer, uint64_t meeting) const {
  const uint64_t word = pages_[peer].inbox[ControlPage::count];
  return word >> 40 == meeting ? static_cast<int64_t>(word & ((1ull << 40) - 1)) : -1;
}

} // namespace tsn::bench
