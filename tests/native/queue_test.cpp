// The device queue as plain C++: kernels' pushes from many host threads against one consumer.
//
// usage: queue_test <producers> <pushes per producer>
#define TSN_HOST_STANDALONE
#include "tests/native/check.h"
#include "tilescale_net/csrc/proxy/queue.h"
#include "tilescale_net/device/proxy_ops.h"

#include <atomic>
#include <random>
#include <thread>
#include <vector>

using namespace tsn;
using namespace tsn::proxy;

namespace {

// One device queue with everything that the device side needs, starting at any position.
struct Setup {
  uint32_t abort_word = 0;
  ErrorRecord error = {};
  std::vector<char> memory;
  std::vector<HostQueue> queues;
  std::vector<QueueView> views;
  std::vector<uint64_t> words; // the heap's system area
  Context context = {};

  Setup(uint32_t capacity, uint64_t start, int n_queues = 1, double timeout = 30)
      : memory((size_t)n_queues * (HostQueue::memory_bytes(capacity) + 256)), words(kSystemBytes / 8) {
    auto at = (reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t(127);
    for (int q = 0; q < n_queues; q++) {
      queues.emplace_back(reinterpret_cast<void*>(at), capacity, start);
      uint64_t* mine = &words[(size_t)(kQueueWords + q * kQueueWordsStride)];
      mine[0] = mine[kTailCacheWord] = start;
      views.push_back(
          queues.back().view(at, reinterpret_cast<uint64_t>(mine), reinterpret_cast<uint64_t>(mine + kTailCacheWord)));
      at += (HostQueue::memory_bytes(capacity) + 127) & ~size_t(127);
    }
    context.n_pes = 1000;
    context.n_queues = (uint32_t)n_queues;
    context.queue_share = queue_share_of(context.n_queues);
    context.heap_base = reinterpret_cast<uint64_t>(words.data()); // of the heap, only this area exists
    context.heap_bytes = 1ull << 43;
    context.abort_word = reinterpret_cast<uint64_t>(&abort_word);
    context.error = reinterpret_cast<uint64_t>(&error);
    context.timeout_ns = (uint64_t)(timeout * 1e9);
    context.queues = reinterpret_cast<uint64_t>(views.data());
  }
  template <class T = void>
  T* at(uint64_t offset) {
    return reinterpret_cast<T*>(context.heap_base + offset);
  }
};

const uint64_t kStarts[] = {0,
                            1,
                            (1ull << 32) - 100, // positions cross 2^32
                            (1ull << 58) - 100, // tickets wrap
                            (1ull << 63) - 100, // signed differences wrap
                            0 - 100ull,         // positions wrap
                            (1ull << 32) * 6 - 50};

void layout() {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; i++) {
    Request r = {};
    r.command = (Command)(1 + random() % (kCommandCount - 1));
    r.pe = (uint32_t)(random() & kAllPes);
    r.first = random() & kMaxOffset;
    (is_value(r.command) ? r.data : r.value) = random();
    if (has_second_half(r.command)) r.signal = random() & kMaxOffset & ~7ull;
    if (is_value_signal(r.command)) {
      r.value = random();
    } else if (has_second_half(r.command)) {
      r.second = random() & kMaxOffset;
      r.bytes = random() & ((1ull << kSizeBits) - 1);
    }
    const uint64_t parity = random() & 1;
    const Descriptor d = encode(r, parity);
    const Request back = decode(d);
    CHECK((d.word[0] & 1) == parity && (d.word[2] & 1) == parity);
    CHECK(back.command == r.command && back.pe == r.pe && back.first == r.first && back.value == r.value &&
          back.data == r.data);
    CHECK(back.second == r.second && back.bytes == r.bytes && back.signal == r.signal);
  }
  for (uint64_t position : {0ull, 5ull, (1ull << 58) - 1, ~0ull}) {
    const uint64_t ticket = make_ticket(63, position);
    CHECK(ticket_queue(ticket) == 63);
    CHECK(!ticket_done(ticket, position) && ticket_done(ticket, position + 1) && ticket_done(ticket, position + 5000));
  }
}

// Each way to push arrives with its arguments.
void arguments() {
  Setup s(64, (1ull << 32) - 20);
  const Context* ctx = &s.context;
  HostQueue& q = s.queues[0];
  Request r;
  auto pop = [&] {
    CHECK(q.pop(&r), "nothing arrived");
    q.publish();
  };
  for (int lap = 0; lap < 40; lap++) {
    queue_put(ctx, s.at(4096), s.at(128), 77, 7);
    pop();
    CHECK(r.command == Command::put && r.pe == 7 && r.first == 4096 && r.second == 128 && r.bytes == 77);
    *s.at<uint32_t>(128) = 0xabcdef;
    queue_put(ctx, s.at(4096), s.at(128), 4, 7);
    pop();
    CHECK(r.command == Command::put_value_4 && r.first == 4096 && r.data == 0xabcdef);
    queue_put(ctx, s.at(4098), s.at(128), 4, 7);
    pop();
    CHECK(r.command == Command::put && r.bytes == 4, "a misaligned word travels as a put");
    *s.at<uint8_t>(129) = 0xfe;
    queue_put_signal(ctx, s.at(4097), s.at(129), 1, 7, s.at<uint64_t>(1 << 20), ~0ull - 1, SignalOp::add);
    pop();
    CHECK(r.command == Command::put_value_signal_add_1 && r.first == 4097 && r.data == 0xfe && r.signal == 1 << 20 &&
          r.value == ~0ull - 1);
    queue_put(ctx, s.at(4096), s.at(128), 0, 7);
    CHECK(!q.pop(&r), "an empty put sends nothing");
    queue_put_signal(ctx, s.at(8), s.at(16), 24, 1, s.at<uint64_t>(1 << 20), ~0ull, SignalOp::add);
    pop();
    CHECK(r.command == Command::put_signal_add && r.first == 8 && r.second == 16 && r.bytes == 24 &&
          r.signal == 1 << 20 && r.value == ~0ull);
    queue_put_signal(ctx, s.at(8), s.at(16), 0, 1, s.at<uint64_t>(64), 3, SignalOp::set);
    pop();
    CHECK(r.command == Command::signal_set && r.first == 64 && r.value == 3);
    for (int bytes : {1, 2, 4, 8}) {
      queue_put_value(ctx, s.at(80), 0x1122334455667788ull, bytes, 9);
      pop();
      CHECK(is_value(r.command) && (int)value_bytes(r.command) == bytes && r.data == 0x1122334455667788ull);
    }
    queue_fence(ctx, 3);
    pop();
    CHECK(r.command == Command::fence && r.pe == 3);
    queue_fence(ctx, -1);
    pop();
    CHECK(r.command == Command::fence && r.pe == kAllPes);
    const uint64_t flush = queue_flush(ctx, 3), get = queue_get(ctx, s.at(0), s.at(512), 33, 2);
    pop();
    CHECK(r.command == Command::flush && r.pe == 3);
    pop();
    CHECK(r.command == Command::get && r.first == 0 && r.second == 512 && r.bytes == 33 && r.pe == 2);
    CHECK(!queue_test(ctx, flush) && !queue_test(ctx, get));
    q.complete(q.position() - 1);
    CHECK(!queue_test(ctx, flush) && queue_test(ctx, get));
    q.complete(q.position() - 2);
    CHECK(queue_test(ctx, flush) && queue_wait(ctx, flush, kOpFlush));
  }
}

// 100 GiB and a bit: two parts, and for put_signal a fence between them.
void parts() {
  Setup s(64, (1ull << 32) - 20);
  const Context* ctx = &s.context;
  HostQueue& q = s.queues[0];
  Request r;
  auto pop = [&] {
    CHECK(q.pop(&r), "nothing arrived");
    q.publish();
  };
  const uint64_t big = (100ull << 30) + 5;
  queue_put_signal(ctx, s.at(0), s.at(1ull << 40), (int64_t)big, 1, s.at<uint64_t>(8), 1, SignalOp::set);
  pop();
  CHECK(r.command == Command::put && r.bytes == kMaxDescriptorBytes && r.first == 0);
  pop();
  CHECK(r.command == Command::fence);
  pop();
  CHECK(r.command == Command::put_signal_set && r.first == kMaxDescriptorBytes &&
        r.second == (1ull << 40) + kMaxDescriptorBytes && r.bytes == big - kMaxDescriptorBytes);
  // Addresses that no descriptor can hold must not come out as others.
  queue_put(ctx, s.at(0ull - 64), s.at(1ull << 50), 8, 1);
  pop();
  CHECK(r.first == kMaxOffset && r.second == kMaxOffset);
}

// A GPU may deliver the halves in any order: half a alone is not a descriptor, with any contents of the slot from
// earlier laps.
void halves() {
  Setup s(2, 0);
  HostQueue& q = s.queues[0];
  uint64_t* slots = reinterpret_cast<uint64_t*>(s.views[0].slots);
  std::mt19937 random(3);
  for (uint64_t position = 0; position < 200; position++) {
    Request sent = {};
    sent.command = random() % 2 ? Command::put : Command::signal_set;
    sent.first = position * 8;
    sent.second = sent.command == Command::put ? position : 0;
    const Descriptor d = encode(sent, parity_of(position, 1));
    uint64_t* slot = slots + position % 2 * 4;
    Request r;
    CHECK(!q.pop(&r) && q.peek() == Command::none);
    slot[0] = d.word[0];
    slot[1] = d.word[1];
    if (sent.command == Command::put) {
      CHECK(!q.pop(&r), "position %d: popped half a descriptor", (int)position);
      slot[2] = d.word[2];
      slot[3] = d.word[3];
    }
    CHECK(q.pop(&r) && r.first == sent.first && r.second == sent.second);
    q.publish();
  }
}

// Many producers, a ring that is nearly always full, any start: everything arrives once, in each producer's order.
void contention(int producers, int pushes, uint32_t capacity, uint64_t start, uint32_t seed) {
  Setup s(capacity, start);
  std::vector<std::thread> threads;
  for (int t = 0; t < producers; t++) {
    threads.emplace_back([&, t] {
      std::mt19937 random(seed + (uint32_t)t);
      for (int i = 0; i < pushes; i++) {
        const uint64_t payload = (uint64_t)t << 32 | (uint32_t)i;
        // Both kinds of slots, so that half b is stale in some laps.
        if (random() % 2)
          queue_put_signal(&s.context, s.at((uint64_t)i), s.at(payload & kMaxOffset), 9 + i, t,
                           s.at<uint64_t>((uint64_t)i * 8), payload, SignalOp::set);
        else queue_signal(&s.context, s.at<uint64_t>((uint64_t)i * 8), payload, t, SignalOp::add);
      }
    });
  }
  std::vector<int> next((size_t)producers, 0);
  std::mt19937 random(seed);
  HostQueue& q = s.queues[0];
  for (int64_t left = (int64_t)producers * pushes; left > 0;) {
    Request r;
    if (!q.pop(&r)) {
      q.publish();
      sched_yield();
      continue;
    }
    left--;
    const int t = (int)(r.value >> 32), i = (int)(uint32_t)r.value;
    CHECK(t < producers && i == next[(size_t)t], "start %llx: producer %d sent %d, expected %d",
          (unsigned long long)start, t, i, next[(size_t)t]);
    CHECK((int)r.pe == t);
    if (r.command == Command::put_signal_set) {
      CHECK(r.bytes == (uint64_t)i + 9 && r.first == (uint64_t)i && r.signal == (uint64_t)i * 8);
      CHECK(r.second == (((uint64_t)t << 32 | (uint32_t)i) & kMaxOffset), "halves of different descriptors");
    } else {
      CHECK(r.command == Command::signal_add && r.first == (uint64_t)i * 8);
    }
    next[(size_t)t]++;
    if (random() % 4 == 0) q.publish();
  }
  for (auto& t : threads) t.join();
  Request r;
  CHECK(!q.pop(&r), "more arrived than was pushed");
  CHECK(s.error.kind == kNoError);
}

// What is written before a push is visible to the thread that pops it: a plain variable, so that ThreadSanitizer
// judges.
void publication(int rounds) {
  Setup s(8, 0);
  std::vector<int> payload((size_t)rounds, 0);
  std::thread producer([&] {
    for (int i = 0; i < rounds; i++) {
      payload[(size_t)i] = i + 1;
      queue_signal(&s.context, s.at<uint64_t>(8), (uint64_t)i, 1, SignalOp::set);
    }
  });
  Request r;
  for (int i = 0; i < rounds;) {
    if (!s.queues[0].pop(&r)) {
      sched_yield();
      continue;
    }
    CHECK(payload[r.value] == (int)r.value + 1);
    s.queues[0].publish();
    i++;
  }
  producer.join();
}

// A ring that stays full: the push ends with an error that names the queue's state, or at once when the job is over.
void full() {
  for (const bool abort : {false, true}) {
    Setup s(4, 0 - 2ull, 1, abort ? 1000 : 0.2);
    std::thread stopper;
    for (int i = 0; i < 4; i++) queue_signal(&s.context, s.at<uint64_t>(8), 1, 5, SignalOp::set);
    CHECK(s.error.kind == kNoError);
    if (abort) {
      stopper = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        __atomic_store_n(&s.abort_word, 1, __ATOMIC_RELEASE);
      });
    }
    queue_signal(&s.context, s.at<uint64_t>(8), 1, 5, SignalOp::set);
    if (abort) {
      stopper.join();
      CHECK(s.error.kind == kNoError, "an abort is no timeout");
    } else {
      CHECK(s.error.kind == kQueueTimeout && s.error.pe == 5 && s.error.operation == kOpSignal);
      CHECK(s.error.observed == 0 - 2ull, "the tail as seen last");
    }
    CHECK(s.abort_word == 1);
    const uint64_t ticket = make_ticket(0, 0 - 2ull);
    CHECK(!queue_wait(&s.context, ticket, kOpFlush), "a wait in an aborted job ends");
  }
  Setup s(4, 0, 1, 0.2);
  const uint64_t ticket = queue_flush(&s.context, 3);
  CHECK(!queue_wait(&s.context, ticket, kOpQuiet, 3) && s.error.kind == kFlushTimeout && s.error.pe == 3);
}

// A flush of all PEs leaves a share in every queue, all with the ticket of queue 0.
void flush_all() {
  Setup s(16, 1000, 3);
  for (int i = 0; i < 50; i++) {
    queue_signal(&s.context, s.at<uint64_t>(8), 1, i % 3, SignalOp::set);
    const uint64_t ticket = queue_flush(&s.context, -1);
    CHECK(ticket_queue(ticket) == 0);
    for (int q = 0; q < 3; q++) {
      Request r;
      if (q == i % 3) CHECK(s.queues[(size_t)q].pop(&r) && r.command == Command::signal_set);
      CHECK(s.queues[(size_t)q].pop(&r) && r.command == Command::flush_part && r.value == ticket && r.pe == kAllPes);
      s.queues[(size_t)q].publish();
    }
    CHECK(!queue_test(&s.context, ticket));
    s.queues[0].complete(ticket & kTicketPositionMask);
    CHECK(queue_test(&s.context, ticket));
  }
}

// Every PE's queue is PE % n_queues.
void queues_of_pes() {
  Context c = {};
  for (c.n_queues = 1; c.n_queues <= kMaxQueues; c.n_queues++) {
    c.queue_share = queue_share_of(c.n_queues);
    for (uint32_t pe = 0; pe < kMaxPes; pe++)
      CHECK(detail::queue_of(&c, int(pe)) == pe % c.n_queues, "PE %u of %u queues", pe, c.n_queues);
  }
}

} // namespace

int main(int argc, char** argv) {
  const int producers = argc > 1 ? std::atoi(argv[1]) : 8;
  const int pushes = argc > 2 ? std::atoi(argv[2]) : 5000;
  layout();
  queues_of_pes();
  arguments();
  parts();
  halves();
  uint32_t seed = 1;
  for (uint64_t start : kStarts)
    for (uint32_t capacity : {2u, 8u, 64u, 1024u}) // a ring of two costs a change of threads every other push
      contention(producers, pushes / (capacity == 2 ? 28 : 7), capacity, start, seed++);
  contention(producers, pushes, 256, 0, 99);
  publication(pushes);
  full();
  flush_all();
  std::puts("ok");
  return 0;
}
