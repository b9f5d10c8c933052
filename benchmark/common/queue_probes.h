// Device code of benchmark/device_queue.py: the queue's functions in loops, and the minimum that could do the same.
// Included into the kernel of benchmark/common/queue.py; addresses arrive as integers.

namespace tsn {
namespace probe {

enum Kind {
  kPush,
  kPushPublished,
  kFence,
  kQueueTrip,
  kQueueTripPublished,
  kFlagTrip,
  kFlagTripPublished,
  kOneWay,
  kReleaseTrip,
  kReleaseTripPublished
};

struct Arguments {
  const Context* ctx;
  uint64_t payload;
  int64_t bytes;
  uint64_t out, in; // words that are written, or named to the proxy, and watched
  int pe;
  int64_t first; // values of flags and signals are first + 1 ... first + turns
  int turns;
};

// A payload that changes from turn to turn.
TSN_DEVICE void write_payload(uint64_t payload, uint64_t value) {
  platform::store<Order::relaxed, MemScope::gpu>(reinterpret_cast<uint64_t*>(payload), value);
}

// Waits for the watched word to reach `value`; false when the job is over.
TSN_DEVICE bool watch(const Arguments& a, int pe, uint64_t value) {
  const auto* word = reinterpret_cast<const uint64_t*>(a.in);
  uint64_t seen = 0;
  return spin(
      a.ctx,
      [&] {
        seen = platform::load<Order::acquire, MemScope::sys>(word);
        return seen >= value;
      },
      [&] { fail(a.ctx, kWaitTimeout, kOpWait, pe, word, value, seen, 0); });
}

// Every calling thread pushes puts from its own slot. With `publish` each of them publishes a payload written just
// before it; without, all of them follow one fence.
template <bool publish>
TSN_DEVICE void push(const Arguments& a) {
  const uint64_t thread = platform::block_index() * platform::block_threads() + platform::thread_index();
  const uint64_t mine = a.payload + uint64_t(a.bytes) * thread;
  if (!publish) {
    write_payload(mine, 1);
    queue_publish();
  }
  for (int i = 0; i < a.turns; i++) {
    if (publish) write_payload(mine, uint64_t(i));
    queue_put<publish>(a.ctx, reinterpret_cast<void*>(mine), reinterpret_cast<const void*>(mine), a.bytes, a.pe);
  }
}

// The cost of publishing a payload alone.
TSN_DEVICE void fences(const Arguments& a) {
  for (int i = 0; i < a.turns; i++) {
    write_payload(a.payload, uint64_t(i));
    platform::fence<MemScope::sys>();
  }
}

// A flush, and its completion seen; `publish`: a put with its payload before it.
template <bool publish>
TSN_DEVICE void queue_trips(const Arguments& a) {
  void* data = reinterpret_cast<void*>(a.payload);
  for (int i = 0; i < a.turns; i++) {
    if (publish) {
      write_payload(a.payload, uint64_t(i));
      queue_put(a.ctx, data, data, a.bytes, a.pe);
    }
    if (!queue_wait(a.ctx, queue_flush(a.ctx, a.pe), kOpQuiet, a.pe)) return;
  }
}

// A flag to the CPU and its answer; `publish`: a payload before it.
template <Order order, bool publish>
TSN_DEVICE void flag_trips(const Arguments& a) {
  for (uint64_t v = uint64_t(a.first) + 1; v <= uint64_t(a.first + a.turns); v++) {
    if (publish) write_payload(a.payload, v);
    if (publish && order == Order::relaxed) platform::fence<MemScope::sys>();
    platform::store<order, MemScope::sys>(reinterpret_cast<uint64_t*>(a.out), v);
    if (!watch(a, -1, v)) return;
  }
}

// put_signal to a PE whose memory this device reaches too, until the signal is seen there.
TSN_DEVICE void one_way_trips(const Arguments& a) {
  void* data = reinterpret_cast<void*>(a.payload);
  for (uint64_t v = uint64_t(a.first) + 1; v <= uint64_t(a.first + a.turns); v++) {
    write_payload(a.payload, v);
    queue_put_signal(a.ctx, data, data, a.bytes, a.pe, reinterpret_cast<uint64_t*>(a.out), v, SignalOp::set);
    if (!watch(a, a.pe, v)) return;
  }
}

TSN_DEVICE void run(const void* words, int kind, uint64_t payload, int64_t bytes, uint64_t out, uint64_t in, int pe,
                    int64_t first, int turns) {
  const Arguments a = {static_cast<const Context*>(words), payload, bytes, out, in, pe, first, turns};
  switch (kind) {
  case kPush:
    return push<false>(a);
  case kPushPublished:
    return push<true>(a);
  case kFence:
    return fences(a);
  case kQueueTrip:
    return queue_trips<false>(a);
  case kQueueTripPublished:
    return queue_trips<true>(a);
  case kFlagTrip:
    return flag_trips<Order::relaxed, false>(a);
  case kFlagTripPublished:
    return flag_trips<Order::relaxed, true>(a);
  case kReleaseTrip:
    return flag_trips<Order::release, false>(a);
  case kReleaseTripPublished:
    return flag_trips<Order::release, true>(a);
  case kOneWay:
    return one_way_trips(a);
  }
}

} // namespace probe
} // namespace tsn
