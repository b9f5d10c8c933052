// A CPU that writes to a peer without queue, descriptors or ordering: the provider's limit of the proxy.
//
// It uses a Transport as the proxy does, with the same pieces and window, on the same memory: GPU memory that the
// transport cannot reach goes through pinned slots. Two processes run it side by side: write() and finish() against
// serve(), ping() against pong().
#include <pybind11/pybind11.h>

#include "benchmark/native/instruments.h"
#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/bindings.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include "tilescale_net/csrc/proxy/heap_memory.h"
#include "tilescale_net/csrc/proxy/peer_state.h"

#include <sched.h>

namespace py = pybind11;

namespace tsn::bench {

using namespace fabric;

namespace {

constexpr uint32_t kBlobMagic = 0x74736e62;

// The path through pinned slots, for memory that the transport cannot reach: copied out of the source, written to the
// slot of the same number at the peer, copied in there, and returned with a message. The minimum of a proxy with
// staging (proxy/staging.h).
class BareStaging {
public:
  // `cuda`: memory at `base` is on GPU `device`, else the host's. Throws FabricError, CudaError.
  BareStaging(Transport* transport, uint64_t base, bool cuda, int device, uint64_t chunk_bytes, uint32_t slots)
      : base_(base), cuda_(cuda), device_(device), slots_(slots), slot_bytes_(((chunk_bytes + 63) & ~63ull) + 64),
        send_(slots_ * slot_bytes_, cuda), receive_(slots_ * slot_bytes_, cuda) {
    send_region_ = transport->register_memory({send_.data(), send_.bytes(), Memory::host, 0});
    receive_region_ = transport->register_memory({receive_.data(), receive_.bytes(), Memory::host, 0});
    for (uint32_t i = slots; i > 0; i--) free_.push_back(i - 1);
    std::memset(send_.data(), 0, send_.bytes()); // exclude page faults from measured times
    std::memset(receive_.data(), 0, receive_.bytes());
  }

  Region receive_region() const { return receive_region_; }
  void set_peer(RemoteRegion slots) { remote_ = slots; }

  // Begins to copy a piece out; false if no slot is free.
  bool begin(uint64_t offset, uint64_t bytes) {
    if (free_.empty()) return false;
    const uint32_t slot = free_.back();
    free_.pop_back();
    char* to = send_.data() + place(slot);
    const Header header = {offset, bytes};
    std::memcpy(to, &header, sizeof header);
    memory().copy_out(to + sizeof header, offset, bytes);
    filling_.push({slot, sizeof header + bytes, memory().out_position()});
    return true;
  }
  // Posts the pieces whose copies have ended, in order. `post` is called with the copy to post and does not fail.
  template <class PostWrite>
  void post_ready(int peer, uint64_t rails, PostWrite post) {
    memory().poll();
    while (!filling_.empty() && filling_.front().position <= memory().out_completed()) {
      const Step step = filling_.front();
      filling_.pop();
      Transport::Copy c = {};
      c.rail = (int)(step.slot % rails);
      c.peer = peer;
      c.local = send_region_;
      c.remote = remote_;
      c.local_offset = c.remote_offset = place(step.slot);
      c.bytes = step.bytes;
      c.has_imm = true;
      c.imm = step.slot;
      c.source_only = true; // slots are given back
      post(c);
    }
  }
  // Slots of pieces in flight, until their return.
  uint64_t outstanding() const { return slots_ - free_.size(); }
  void given_back(uint32_t slot) { free_.push_back(slot); }

  // A piece has arrived in a slot: begins to copy it in.
  void arrived(uint32_t slot) {
    const char* from = receive_.data() + place(slot);
    Header header;
    std::memcpy(&header, from, sizeof header);
    memory().copy_in(header.offset, from + sizeof header, header.bytes);
    landing_.push({slot, header.bytes, memory().in_position()});
  }
  // The next slot whose data are in place; false if no slot is.
  bool landed(uint32_t* slot) {
    memory().poll();
    if (landing_.empty() || landing_.front().position > memory().in_completed()) return false;
    *slot = landing_.front().slot;
    landing_.pop();
    return true;
  }

private:
  struct Header {
    uint64_t offset, bytes;
  };
  struct Step {
    uint32_t slot;
    uint64_t bytes, position; // of the memory's copies
  };
  proxy::HeapMemory& memory() {
    if (!memory_)
      memory_ =
          cuda_ ? proxy::make_cuda_memory(base_, device_, 0) : proxy::make_host_memory(reinterpret_cast<void*>(base_));
    return *memory_;
  }
  uint64_t place(uint32_t slot) const { return slot * slot_bytes_; }

  uint64_t base_;
  bool cuda_;
  int device_;
  uint64_t slots_, slot_bytes_;
  cuda::PinnedBlock send_, receive_;
  Region send_region_, receive_region_;
  RemoteRegion remote_ = -1;
  std::unique_ptr<proxy::HeapMemory> memory_; // made by the thread that uses it: CUDA contexts belong to threads
  std::vector<uint32_t> free_;
  proxy::Ring<Step> filling_, landing_;
};

struct BareWriterOptions {
  uint64_t bytes = 64 << 20;  // of the buffer
  uint64_t base = 0;          // memory to use; 0: new host memory
  bool cuda = false;          // `base` is on a GPU
  int device = 0;             // its number
  bool force_staging = false; // go through pinned slots even if the transport reaches the memory
  uint64_t chunk_bytes = 1 << 20;
  uint32_t window = 64;  // pieces in flight, over all rails
  bool dedicated = true; // the thread has its own core: it never yields while idle, see ProxyOptions
  double timeout = 20;   // seconds without an event after which a call gives up
  TransportOptions transport;
};

class BareWriter {
public:
  // Throws FabricError.
  explicit BareWriter(const BareWriterOptions& options) : options_(options), events_(128) {
    transport_ = make_transport(options_.transport);
    options_.chunk_bytes = std::min(options_.chunk_bytes, transport_->properties().max_write);
    if (!options_.base) {
      buffer_ = std::make_unique<cuda::PinnedBlock>(options_.bytes, false);
      options_.base = reinterpret_cast<uint64_t>(buffer_->data());
      std::memset(buffer_->data(), 1, options_.bytes); // exclude page faults from measured times
    }
    if (options_.force_staging || (options_.cuda && !transport_->properties().device_memory)) {
      staging_ = std::make_unique<BareStaging>(transport_.get(), options_.base, options_.cuda, options_.device,
                                               options_.chunk_bytes, options_.window);
      region_ = staging_->receive_region();
    } else {
      region_ = transport_->register_memory({reinterpret_cast<void*>(options_.base), options_.bytes,
                                             options_.cuda ? Memory::cuda : Memory::host, options_.device});
    }
    out_.resize((size_t)transport_->properties().rails);
  }
  ~BareWriter() {
    // Drain the completion queue: libfabric's efa polls it while it closes an endpoint, and has crashed there.
    try {
      for (int quiet = 0; quiet < 100;) quiet = transport_->poll(events_.data(), (int)events_.size()) ? 0 : quiet + 1;
    } catch (const FabricError&) {
      // The failed operation was this writer's; nothing waits for it.
    }
    transport_.reset();
  }

  std::string address() const {
    BlobWriter w(kBlobMagic);
    w.text(transport_->address());
    w.text(transport_->region_key(region_));
    return w.take();
  }
  void connect(int peer, const std::string& address) {
    BlobReader r(address, kBlobMagic, concat("the address of peer ", peer));
    transport_->connect(peer, r.text());
    if (remote_.size() <= (size_t)peer) remote_.resize((size_t)peer + 1, -1);
    remote_[peer] = transport_->add_remote(peer, r.text());
    if (staging_) staging_->set_peer(remote_[peer]);
  }

  // Writes `bytes` bytes `count` times; with `blocking` each is complete before the next begins. Seconds from the first
  // post to the last completion; the data are at the peer if the provider has delivery-complete. `from`: a peer, or -1,
  // that writes here at the same time; serve() it afterwards.
  double write(int peer, uint64_t bytes, int count, bool blocking, int from) {
    if (bytes > options_.bytes) fail(concat(bytes, " bytes do not fit the buffer"));
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
          fail(concat("peer ", peer, " completed nothing for ", options_.timeout, " s"));
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
        c.remote = remote_[peer];
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
  // Round trips of a write with an immediate, answered in kind by the peer's pong() of the same size and count; seconds
  // for all of them. Half of a round trip is the one-way time, until the target's CPU has seen the data.
  double ping(int peer, uint64_t bytes, int count) { return exchange(peer, bytes, count, true); }
  void pong(int peer, uint64_t bytes, int count) { exchange(peer, bytes, count, false); }
  // Drives progress for the peer's write() until it calls finish().
  void serve(int peer) {
    // Writes without immediates are silent here, so only a long silence shows that the writer is gone.
    const uint64_t end = now_ns() + (uint64_t)(60 * options_.timeout * 1e9);
    while (!finished_) {
      poll();
      if (staging_) land(peer);
      if (now_ns() > end) fail(concat("peer ", peer, " went away without saying so"));
    }
    finished_ = false;
  }
  // Ends the peer's serve().
  void finish(int peer) {
    const char done[8] = "done";
    while (transport_->post_message(0, peer, done, sizeof done, kSilent) == Post::again) poll();
    const uint64_t end = now_ns() + 20000000; // let it leave
    while (now_ns() < end) poll();
  }

  const Properties& properties() const { return transport_->properties(); }

private:
  int poll() {
    const int n = transport_->poll(events_.data(), (int)events_.size());
    for (int i = 0; i < n; i++) {
      const Event& e = events_[i];
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
  // Call it after polls without events: gives up after too long a silence.
  void check_timeout(uint64_t* since, const std::string& what) {
    const uint64_t now = now_ns();
    if (*since == 0) *since = now;
    else if (now - *since > (uint64_t)(options_.timeout * 1e9)) fail(concat(what, " for ", options_.timeout, " s"));
  }
  double write_staged(int peer, uint64_t bytes, int count, bool blocking, int from) {
    const uint64_t start = now_ns();
    const std::string silence = concat("peer ", peer, " gave no slot back");
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
  double exchange_staged(int peer, uint64_t bytes, int count, bool first) {
    if (bytes > options_.chunk_bytes) fail(concat(bytes, " bytes do not fit a slot"));
    uint64_t since = 0;
    const std::string silence = concat("peer ", peer, " did not answer");
    auto send = [&] {
      while (!staging_->begin(0, bytes)) poll(), check_timeout(&since, silence);
      const uint64_t before = posted_;
      while (posted_ == before) post_staged(peer);
      since = 0;
    };
    // The piece is in the memory itself before the answer leaves; its slot is returned afterwards.
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
  // Writes the pieces that have been copied out to their slots.
  void post_staged(int peer) {
    staging_->post_ready(peer, out_.size(), [&](Transport::Copy c) {
      c.cookie = (uint64_t)c.rail << 40 | c.bytes;
      post(c);
    });
  }
  // Notifies the peer that its piece has arrived.
  void return_slot(int peer, uint32_t slot) {
    uint64_t since = 0;
    while (transport_->post_message(0, peer, &slot, sizeof slot, kSilent) == Post::again)
      if (!poll()) check_timeout(&since, concat("peer ", peer, " took no message"));
  }
  // Copies arrived pieces in, and returns slots whose data are in place.
  void land(int peer) {
    for (uint32_t slot : arrivals_) staging_->arrived(slot);
    arrivals_.clear();
    uint32_t slot;
    while (staging_->landed(&slot)) return_slot(peer, slot);
  }
  double exchange(int peer, uint64_t bytes, int count, bool first) {
    if (bytes > options_.bytes) fail(concat(bytes, " bytes do not fit the buffer"));
    if (staging_) return exchange_staged(peer, bytes, count, first);
    Transport::Copy c = {};
    c.peer = peer;
    c.local = region_;
    c.remote = remote_[peer];
    c.bytes = c.cookie = bytes;
    c.has_imm = true;
    const uint64_t start = now_ns();
    for (int i = 0; i < count; i++) {
      if (first) post(c);
      const uint64_t begun = now_ns();
      while (immediates_ == seen_)
        if (!poll() && now_ns() - begun > (uint64_t)(options_.timeout * 1e9))
          fail(concat("peer ", peer, " did not answer for ", options_.timeout, " s"));
      seen_++;
      if (!first) post(c);
    }
    const double seconds = (double)(now_ns() - start) * 1e-9;
    while (posted_ != completed_) poll();
    return seconds;
  }
  void post(const Transport::Copy& copy) {
    const uint64_t start = now_ns();
    for (;;) {
      const Post post = transport_->post_write(copy);
      if (post == Post::ok) break;
      if (post == Post::error) fail(transport_->last_error());
      if (poll() == 0 && now_ns() - start > (uint64_t)(options_.timeout * 1e9))
        fail(concat("peer ", copy.peer, " took nothing for ", options_.timeout, " s"));
    }
    posted_++;
    out_[copy.rail] += copy.bytes;
  }
  void fail(const std::string& what) {
    throw FabricError(concat("rank ", options_.transport.rank, ": bare writer: ", what));
  }

  BareWriterOptions options_;
  std::unique_ptr<cuda::PinnedBlock> buffer_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BareStaging> staging_; // nullptr: the transport reaches the memory
  Region region_ = -1;
  std::vector<RemoteRegion> remote_;
  std::vector<Event> events_;
  std::vector<uint64_t> out_; // bytes in flight, by rail
  uint64_t posted_ = 0, completed_ = 0;
  uint64_t immediates_ = 0, seen_ = 0; // arrived, and answered or taken as an answer
  uint32_t idle_ = 0;                  // polls without an event
  std::vector<uint32_t> arrivals_;     // staged: slots that pieces have arrived in
  bool finished_ = false;
};

BareWriterOptions options_from(const TransportOptions& transport, const py::kwargs& kwargs) {
  BareWriterOptions o;
  o.transport = transport;
  std::string heap_kind = "host";
  KeywordFields("BareWriter")
      .add(TSN_NAMED(o.bytes, o.base, heap_kind, o.device, o.force_staging, o.chunk_bytes, o.window, o.dedicated,
                     o.timeout))
      .set(kwargs);
  o.cuda = memory_kind("heap_kind", heap_kind) == Memory::cuda;
  return o;
}

} // namespace

void bind_bare_writer(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<BareWriter>(
      m, "BareWriter",
      "A CPU that writes to a peer without a proxy: the provider's limit. Keyword arguments are the fields of "
      "BareWriterOptions; base, heap_kind ('host' or 'cuda') and device describe the memory. Times are in seconds.")
      .def(py::init([](const TransportOptions& transport, const py::kwargs& kwargs) {
        const BareWriterOptions o = options_from(transport, kwargs);
        py::gil_scoped_release release;
        return std::make_unique<BareWriter>(o);
      }))
      .def("address", [](const BareWriter& w) { return py::bytes(w.address()); })
      .def("connect", &BareWriter::connect, py::arg("peer"), py::arg("address"), no_gil)
      .def("write", &BareWriter::write, py::arg("peer"), py::arg("bytes"), py::arg("count"),
           py::arg("blocking") = false, py::arg("from_peer") = -1, no_gil)
      .def("ping", &BareWriter::ping, py::arg("peer"), py::arg("bytes"), py::arg("count"), no_gil)
      .def("pong", &BareWriter::pong, py::arg("peer"), py::arg("bytes"), py::arg("count"), no_gil)
      .def("serve", &BareWriter::serve, py::arg("peer"), no_gil)
      .def("finish", &BareWriter::finish, py::arg("peer"), no_gil);
}

} // namespace tsn::bench
