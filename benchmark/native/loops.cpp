#include "benchmark/native/loops.h"

#include <sched.h>
#include <sys/mman.h>

#include "tilescale_net/csrc/cuda/driver.h"
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
  if (p == MAP_FAILED) throw FabricError(concat("no memory for a buffer of ", bytes, " bytes: choose smaller sizes"));
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
  BlobReader blob(address, kMagic, concat("the address of rank ", peer));
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
    throw FabricError(concat("rank ", self_, ", ", doing, " with rank ", peer, " over provider '",
                             transport_->properties().provider, "': nothing has happened for ",
                             static_cast<int>(timeout_s_),
                             " s; that rank has ended, or the network between the two is broken"));
}

int Session::fetch(Event* events, int capacity, const char* doing, int peer, bool passive) {
  const int got = transport_->poll(events, capacity);
  if (__builtin_expect(++polls_ % 64 == 0, 0)) check_timeout(doing, peer, passive);
  if (!got) return 0;
  busy_poll_ = polls_;
  int n = 0;
  for (int i = 0; i < got; ++i) {
    if (events[i].kind == Event::failed)
      throw FabricError(concat("rank ", self_, ", ", doing, " with rank ", peer, ": ", events[i].text));
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

// --- bandwidth -----------------------------------------------------------------------------------------------------

namespace {

constexpr uint64_t kReceive = 1ull << 61; // cookie bit of receives; in a ping-pong the others number the chunk
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

  // Posts one list, or its rest after the transport answered `again` in its middle.
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
        throw FabricError(concat("received ", events[i].bytes, " bytes instead of ", o_.bytes));
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

// --- ping-pong -----------------------------------------------------------------------------------------------------

namespace {

// Copies between GPU memory and pinned host memory, several at once, for providers that cannot reach GPU memory.
class CopyStreams {
public:
  // `host` and `device_address` are two images of one buffer of `bytes` bytes. Pins the host memory. Throws CudaError.
  CopyStreams(char* host, uint64_t device_address, uint64_t bytes, int device)
      : context_(device), host_(host), device_(device_address) {
    cuda::check(cuda::driver().cuMemHostRegister(host, bytes, cuda::kHostRegisterPortable),
                "pinning the staging buffer");
    for (Slot& slot : slots_)
      cuda::check(cuda::driver().cuStreamCreate(&slot.stream, cuda::kStreamNonBlocking), "creating a stream");
  }
  ~CopyStreams() {
    for (Slot& slot : slots_)
      if (slot.stream) {
        cuda::driver().cuStreamSynchronize(slot.stream);
        cuda::driver().cuStreamDestroy(slot.stream);
      }
    cuda::driver().cuMemHostUnregister(host_);
  }
  CopyStreams(const CopyStreams&) = delete;

  // Begins to copy [offset, offset + bytes) to the host or to the device; false when too many copies are in flight.
  bool begin(bool to_host, uint64_t offset, uint64_t bytes, uint64_t tag) {
    for (Slot& slot : slots_) {
      if (slot.busy) continue;
      if (to_host)
        cuda::check(cuda::driver().cuMemcpyDtoHAsync(host_ + offset, device_ + offset, bytes, slot.stream),
                    "copying to the host");
      else
        cuda::check(cuda::driver().cuMemcpyHtoDAsync(device_ + offset, host_ + offset, bytes, slot.stream),
                    "copying to the device");
      slot.busy = true;
      slot.what = {to_host, tag};
      return true;
    }
    return false;
  }

  struct Done {
    bool to_host;
    uint64_t tag;
  };
  // Fills `done` with the copies that have ended since the last call.
  void poll(std::vector<Done>& done) {
    constexpr cuda::Result kNotReady = 600; // CUDA_ERROR_NOT_READY
    done.clear();
    for (Slot& slot : slots_) {
      if (!slot.busy) continue;
      const cuda::Result state = cuda::driver().cuStreamQuery(slot.stream);
      if (state == kNotReady) continue;
      cuda::check(state, "a staging copy");
      slot.busy = false;
      done.push_back(slot.what);
    }
  }

  // Copies and waits.
  void copy(bool to_host, uint64_t offset, uint64_t bytes) {
    std::vector<Done> done;
    while (!begin(to_host, offset, bytes, 0)) poll(done);
    for (Slot& slot : slots_) cuda::check(cuda::driver().cuStreamSynchronize(slot.stream), "a staging copy");
    poll(done);
  }

private:
  static constexpr int kStreams = 4;
  struct Slot {
    cuda::Stream stream = nullptr;
    bool busy = false;
    Done what = {};
  };

  cuda::PrimaryContext context_;
  char* host_;
  uint64_t device_;
  Slot slots_[kStreams];
};

class PingPong {
public:
  PingPong(Session& session, int peer, const PingPongOptions& options)
      : session_(session), transport_(session.transport()), peer_(peer), o_(options),
        chunk_(std::min({options.chunk, transport_.properties().max_send, options.bytes})),
        chunks_((options.bytes + chunk_ - 1) / chunk_), part_(ping_pong_part(options.bytes, chunk_)),
        window_(std::min(options.window, transport_.properties().depth)),
        copied_bytes_(transport_.properties().inject_bytes), whole_(chunks_, chunk_), lengths_(chunks_) {
    whole_.back() = o_.bytes - (chunks_ - 1) * chunk_;
    for (uint64_t left : session.receives_posted)
      if (left) throw FabricError("a ping-pong needs a session without receives left over from another benchmark");
    if (3 * part_ > session.bytes())
      throw FabricError(concat("a ping-pong of ", o_.bytes, " bytes needs a larger buffer"));
    if (o_.device_address) {
      staged_ = session.data() != nullptr;
      if (!staged_) mirror_.resize(session.bytes());
      staging_ = std::make_unique<CopyStreams>(staged_ ? session.data() : mirror_.data(), o_.device_address,
                                               session.bytes(), o_.device);
    }
    host_ = session.data() ? session.data() : mirror_.data();
  }

  std::vector<double> run() {
    const uint64_t turns = o_.warmup + o_.iterations;
    std::vector<double> seconds;
    seconds.reserve(o_.iterations);
    expect(0);
    session_.sync(peer_);
    for (uint64_t turn = 0; turn < turns; ++turn) {
      const bool more = turn + 1 < turns;
      if (!o_.starter) { // everything in, next receives posted, everything out again
        receive_all();
        const uint64_t from = incoming_;
        echo_.resize(chunks_);
        std::swap(echo_, lengths_);
        if (more) expect(turn + 1);
        send_all(from, echo_);
        continue;
      }
      // The data changes in every turn of the warm-up and before the first timed one: old data cannot pass for new.
      const bool fresh = o_.verify && turn <= o_.warmup, last = !more;
      if (fresh) prepare(turn);
      const uint64_t start = ticks();
      send_all(0, whole_);
      receive_all();
      if (turn >= o_.warmup) seconds.push_back((ticks() - start) / ticks_per_second());
      if (o_.verify && (turn < o_.warmup || last)) compare();
      if (more) expect(turn + 1);
    }
    session_.sync(peer_);
    return seconds;
  }

private:
  // Prepares one message into the part of `turn`: the window's number of receives.
  void expect(uint64_t turn) {
    incoming_ = part_ * (1 + turn % 2);
    posted_ = received_ = stored_ = 0;
    stores_.clear();
    post_receives();
  }

  void post_receives() {
    for (; posted_ < chunks_ && posted_ - received_ < window_; ++posted_) {
      const Post post =
          transport_.post_receive(0, session_.region(), incoming_ + posted_ * chunk_, chunk_, kReceive | posted_);
      if (post == Post::again) return;
      if (post == Post::error) throw FabricError(transport_.last_error());
    }
  }

  void receive_all() {
    while (received_ < chunks_ || stored_ < chunks_) step();
  }

  void send_all(uint64_t from, const std::vector<uint64_t>& lengths) {
    uint64_t posted = 0;
    sent_ = 0;
    uint64_t loading = 0;
    if (staged_) ready_.assign(chunks_, false);
    while (sent_ < chunks_) {
      if (staged_)
        while (loading < chunks_ && staging_->begin(true, from + loading * chunk_, lengths[loading], loading))
          ++loading;
      while (posted < chunks_ && posted - sent_ < window_ && (!staged_ || ready_[posted])) {
        // Data that the transport copies at once need no completion.
        const bool copied = !o_.device_address && lengths[posted] <= copied_bytes_;
        const Post post = transport_.post_send(0, peer_, session_.region(), from + posted * chunk_, lengths[posted],
                                               copied ? kSilent : posted);
        if (post == Post::again) break;
        if (post == Post::error) throw FabricError(transport_.last_error());
        ++posted;
        sent_ += copied;
      }
      if (sent_ < chunks_) step();
    }
  }

  // Polls everything once.
  void step() {
    Event events[32];
    const int n = session_.poll(events, 32, "exchanging messages", peer_);
    for (int i = 0; i < n; ++i) {
      if (!(events[i].cookie & kReceive)) {
        ++sent_;
        continue;
      }
      const uint64_t slot = events[i].cookie ^ kReceive;
      lengths_[slot] = events[i].bytes;
      ++received_;
      if (staged_) stores_.push_back(slot);
      else ++stored_;
    }
    if (n) post_receives();
    if (!staged_) return;
    while (!stores_.empty() &&
           staging_->begin(false, incoming_ + stores_.back() * chunk_, lengths_[stores_.back()], kReceive))
      stores_.pop_back();
    staging_->poll(copies_);
    for (const CopyStreams::Done& copy : copies_) {
      if (copy.to_host) ready_[copy.tag] = true;
      else ++stored_;
    }
  }

  void prepare(uint64_t turn) {
    fill_pattern(host_, o_.bytes, turn + 1);
    if (staging_) staging_->copy(false, 0, o_.bytes);
  }

  // Every chunk sent must have come back once; on networks that reorder, in any place.
  void compare() {
    if (staging_) staging_->copy(true, incoming_, part_);
    const auto key = [this](uint64_t at, uint64_t length) {
      uint64_t word = 0;
      std::memcpy(&word, host_ + at, std::min<uint64_t>(8, length));
      return word;
    };
    std::unordered_multimap<uint64_t, uint64_t> sent;
    for (uint64_t i = 0; i < chunks_; ++i) sent.emplace(key(i * chunk_, whole_[i]), i);
    for (uint64_t i = 0; i < chunks_; ++i) {
      const uint64_t at = incoming_ + i * chunk_;
      auto found = sent.find(key(at, lengths_[i]));
      if (found == sent.end() || whole_[found->second] != lengths_[i] ||
          std::memcmp(host_ + found->second * chunk_, host_ + at, lengths_[i]))
        throw FabricError(concat("wrong data: chunk ", i, " of a message of ", o_.bytes, " bytes came back from rank ",
                                 peer_, " as something else"));
      sent.erase(found);
    }
  }

  Session& session_;
  Transport& transport_;
  const int peer_;
  const PingPongOptions o_;
  const uint64_t chunk_, chunks_, part_;
  const uint32_t window_, copied_bytes_;
  bool staged_ = false;
  std::unique_ptr<CopyStreams>
      staging_; // with GPU memory: the data path when staged, else for filling and comparing only
  std::vector<char> mirror_;
  char* host_ = nullptr;

  uint64_t incoming_ = 0;                           // where the message being received goes
  uint64_t posted_ = 0, received_ = 0, stored_ = 0; // its receives, and chunks now in their final place
  uint64_t sent_ = 0;
  std::vector<uint64_t> whole_;   // lengths of the chunks of a message
  std::vector<uint64_t> lengths_; // of received chunks, by slot
  std::vector<uint64_t> echo_;    // of chunks in flight back
  std::vector<uint64_t> stores_;  // chunks received and not yet being copied to the GPU
  std::vector<bool> ready_;       // chunks copied to the host, ready to send
  std::vector<CopyStreams::Done> copies_;
};

} // namespace

std::vector<double> run_ping_pong(Session& session, int peer, const PingPongOptions& options) {
  return PingPong(session, peer, options).run();
}

} // namespace tsn::bench
