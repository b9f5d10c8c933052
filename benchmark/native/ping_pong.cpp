#include "benchmark/native/loops.h"

#include <cstring>
#include <memory>
#include <unordered_map>

#include "tilescale_net/csrc/cuda/driver.h"

namespace tsn::bench {
namespace {

// Copies between GPU memory and pinned host memory, several at once, for providers that cannot reach GPU memory.
class CopyStreams {
public:
  // `host` and `device_address` are two images of one buffer of `bytes` bytes. Pins the host memory. Throws CudaError.
  CopyStreams(char* host, uint64_t device_address, uint64_t bytes, int device);
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;

  // Begins to copy [offset, offset + bytes) to the host or to the device; false when too many copies are in flight.
  bool begin(bool to_host, uint64_t offset, uint64_t bytes, uint64_t tag);

  struct Done {
    bool to_host;
    uint64_t tag;
  };
  // Fills `done` with the copies that have ended since the last call.
  void poll(std::vector<Done>& done);

  // Copies and waits.
  void copy(bool to_host, uint64_t offset, uint64_t bytes);

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

CopyStreams::CopyStreams(char* host, uint64_t device_address, uint64_t bytes, int device)
    : context_(device), host_(host), device_(device_address) {
  cuda::check(cuda::driver().cuMemHostRegister(host, bytes, cuda::kHostRegisterPortable), "pinning the staging buffer");
  for (Slot& slot : slots_)
    cuda::check(cuda::driver().cuStreamCreate(&slot.stream, cuda::kStreamNonBlocking), "creating a stream");
}

CopyStreams::~CopyStreams() {
  for (Slot& slot : slots_)
    if (slot.stream) {
      cuda::driver().cuStreamSynchronize(slot.stream);
      cuda::driver().cuStreamDestroy(slot.stream);
    }
  cuda::driver().cuMemHostUnregister(host_);
}

bool CopyStreams::begin(bool to_host, uint64_t offset, uint64_t bytes, uint64_t tag) {
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

void CopyStreams::poll(std::vector<Done>& done) {
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

void CopyStreams::copy(bool to_host, uint64_t offset, uint64_t bytes) {
  std::vector<Done> done;
  while (!begin(to_host, offset, bytes, 0)) poll(done);
  for (Slot& slot : slots_) cuda::check(cuda::driver().cuStreamSynchronize(slot.stream), "a staging copy");
  poll(done);
}

constexpr uint64_t kReceive = 1ull << 61; // cookie bit of receives; the other bits number the chunk

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
      throw FabricError("a ping-pong of " + std::to_string(o_.bytes) + " bytes needs a larger buffer");
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
  // Makes ready for one message into the part that belongs to `turn`: as many receives as the window allows.
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
        // What the transport copies at once needs no completion.
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

  // One look at everything that may have happened.
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
        throw FabricError("wrong data: chunk " + std::to_string(i) + " of a message of " + std::to_string(o_.bytes) +
                          " bytes came back from rank " + std::to_string(peer_) + " as something else");
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
  std::vector<uint64_t> echo_;    // of those on their way back
  std::vector<uint64_t> stores_;  // chunks received and not yet on their way to the GPU
  std::vector<bool> ready_;       // chunks copied to the host and ready to be sent
  std::vector<CopyStreams::Done> copies_;
};

} // namespace

std::vector<double> run_ping_pong(Session& session, int peer, const PingPongOptions& options) {
  return PingPong(session, peer, options).run();
}

} // namespace tsn::bench
