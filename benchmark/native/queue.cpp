// What the device queue and its proxy thread are measured against and with: a CPU thread that answers a flag with a
// flag, the least that any exchange of a device with the host costs; and the rate at which a proxy thread takes
// descriptors and hands them to a transport that completes at once.
#include <pybind11/pybind11.h>

#include "benchmark/native/instruments.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/proxy/proxy.h"
#include "tilescale_net/csrc/testing/null_transport.h"

#include <pthread.h>
#include <sched.h>

namespace py = pybind11;

namespace tsn::bench {
namespace {

using namespace proxy;

// Two words in the kind of memory that queues live in, each in a page of its own. What the device stores to `ping`
// appears in `pong`.
class FlagEcho {
public:
  // `cpu`: where the thread runs; -1: anywhere. Throws std::invalid_argument when it may not run there.
  FlagEcho(bool cuda, int cpu) : memory_(2 * kPage, cuda), shares_core_(!cuda), thread_([this] { run(); }) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(thread_.native_handle(), sizeof set, &set) == 0) return;
    stopping_ = true;
    thread_.join();
    throw std::invalid_argument(
        concat("flag echo: the thread cannot run on CPU ", cpu, ", which this process may not use"));
  }
  ~FlagEcho() {
    stopping_ = true;
    thread_.join();
  }
  uint64_t ping() const { return memory_.device(); }
  uint64_t pong() const { return memory_.device() + kPage; }

private:
  static constexpr uint64_t kPage = 4096;
  void run() {
    auto* ping = reinterpret_cast<uint64_t*>(memory_.data());
    auto* pong = reinterpret_cast<uint64_t*>(memory_.data() + kPage);
    uint64_t last = 0;
    for (uint32_t idle = 0;;) {
      const uint64_t seen = __atomic_load_n(ping, __ATOMIC_ACQUIRE);
      if (seen != last) {
        __atomic_store_n(pong, last = seen, __ATOMIC_RELEASE);
        idle = 0;
      } else if (++idle % 64 == 0) {
        if (shares_core_) sched_yield(); // as the proxy does where no GPU means few cores
        if (idle % 4096 == 0 && stopping_.load(std::memory_order_relaxed)) return;
      }
    }
  }

  cuda::PinnedBlock memory_;
  const bool shares_core_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Writes descriptors as a device would, from the host and alone.
class HostProducer {
public:
  explicit HostProducer(const QueueView& view) : view_(view) {}
  uint64_t push(const Request& r) {
    const Descriptor d = encode(r, parity_of(position_, view_.mask));
    auto* slot = reinterpret_cast<uint64_t*>(view_.slots) + (position_ & view_.mask) * 4;
    for (int i = 3; i >= 1; i--) __atomic_store_n(slot + i, d.word[i], __ATOMIC_RELAXED);
    __atomic_store_n(slot, d.word[0], __ATOMIC_RELEASE);
    return position_++;
  }
  bool done(uint64_t position) const {
    const auto* board = reinterpret_cast<const uint64_t*>(view_.done);
    return ticket_done(position & kTicketPositionMask,
                       __atomic_load_n(board + (position & view_.mask), __ATOMIC_ACQUIRE));
  }

private:
  QueueView view_;
  uint64_t position_ = 0;
};

// Fills a ring with `descriptors` (a power of two, in laps of at most 2^20) puts of `bytes` bytes, or with put_signals,
// and times one thread on them. The producer is out of the picture: each lap is written before the clock starts.
double measure_dispatch(uint64_t descriptors, uint64_t bytes, bool with_signal, int cpu) {
  constexpr uint64_t kLap = 1 << 20;
  const uint64_t heap = std::max<uint64_t>(1 << 20, bytes + kSystemBytes);
  cuda::PinnedBlock memory(heap, false);
  ProxyOptions o;
  o.n_pes = 2;
  o.peers = {1};
  o.heap = {memory.data(), heap, Memory::host, 0};
  o.capacity = (uint32_t)kLap;
  o.inline_bytes = 0;
  o.dedicated = true;
  if (cpu >= 0) o.cpus = {cpu};
  // The null transport answers for the peer, of which only the address is needed.
  ProxyOptions other = o;
  other.rank = 1;
  other.peers = {0};
  other.capacity = 2;
  Proxy peer(other, testing::make_null);
  double seconds = 0; // from the first descriptor taken to the last one complete
  for (uint64_t left = descriptors; left > 0;) {
    const uint64_t n = std::min(left, kLap - 1);
    Proxy ours(o, testing::make_null);
    ours.connect({"", peer.address()});
    HostProducer producer(ours.views()[0]);
    Request r = {};
    r.command = with_signal ? Command::put_signal_set : Command::put;
    r.pe = 1;
    r.first = r.second = kSystemBytes;
    r.bytes = bytes;
    for (uint64_t i = 0; i < n; i++) {
      r.signal = kSystemBytes + 8 * (i % 64);
      r.value = i;
      producer.push(r);
    }
    Request flush = {};
    flush.command = Command::flush;
    flush.pe = 1;
    const uint64_t last = producer.push(flush);
    const uint64_t start = now_ns();
    ours.start();
    while (!producer.done(last)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    seconds += (double)(now_ns() - start) * 1e-9;
    left -= n;
    ours.stop();
  }
  return (double)descriptors / seconds;
}

} // namespace

void bind_queue(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<FlagEcho>(m, "FlagEcho",
                       "A CPU thread that copies the word at `ping` to the word at `pong`, in memory that the device "
                       "reaches like a queue's. It runs as long as the object lives.")
      .def(py::init<bool, int>(), py::arg("cuda"), py::arg("cpu") = -1, no_gil)
      .def_property_readonly("ping", &FlagEcho::ping, "The device's address of the word that it stores to.")
      .def_property_readonly("pong", &FlagEcho::pong, "The device's address of the answer.");

  m.def("measure_dispatch", &measure_dispatch, py::arg("descriptors") = 1 << 22, py::arg("bytes") = 4096,
        py::arg("with_signal") = false, py::arg("cpu") = -1, no_gil,
        "Descriptors per second that one proxy thread takes and hands to a transport that completes at once.");
}

} // namespace tsn::bench
