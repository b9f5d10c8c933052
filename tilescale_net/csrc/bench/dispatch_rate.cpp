#include "tilescale_net/csrc/bench/dispatch_rate.h"

#include "tilescale_net/csrc/proxy/null_transport.h"
#include "tilescale_net/csrc/proxy/proxy.h"

#include <algorithm>

namespace tsn::bench {

using namespace proxy;

namespace {

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

} // namespace

DispatchRate measure_dispatch(uint64_t descriptors, uint64_t bytes, bool with_signal, int cpu) {
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
  Proxy peer(other, make_null_transport);
  DispatchRate rate;
  for (uint64_t left = descriptors; left > 0;) {
    const uint64_t n = std::min(left, kLap - 1);
    Proxy ours(o, make_null_transport);
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
    rate.seconds += (double)(now_ns() - start) * 1e-9;
    rate.descriptors += n;
    left -= n;
    ours.stop();
  }
  return rate;
}

} // namespace tsn::bench
