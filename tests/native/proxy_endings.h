// How proxies end while much is on its way: in good order, and after a failure.
#pragma once

#include "tests/native/proxy_world.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

namespace tsn::proxy {

constexpr uint64_t kLargePut = 800000;

// Where PE `from`'s puts of `kLargePut` bytes go, and its signal words.
inline uint64_t ending_landing(int from) { return kSystemBytes + 65536 + (uint64_t)from * (1 << 20); }
inline uint64_t ending_word(int from) { return kSystemBytes + 8ull * (uint64_t)from; }

// Every PE has large puts in flight to all others when one of them gives up. Each must end without help, with a reason.
inline void end_by_failure(const WorldOptions& o, int round) {
  World w(o);
  w.disorderly();
  w.run([&](Pe& pe, int) {
    const int culprit = round % o.pes;
    for (int i = 0; !aborted(pe.context) && i < 1000000; i++) {
      for (int d = 1; d < o.pes; d++) {
        const int to = (pe.rank + d) % o.pes;
        queue_put_signal(pe.context, pe.at(ending_landing(pe.rank)), pe.at(ending_landing(pe.rank)), kLargePut, to,
                         pe.at<uint64_t>(ending_word(pe.rank)), 1, SignalOp::add);
      }
      if (pe.rank == culprit && i == 3 + round % 7) {
        std::this_thread::sleep_for(std::chrono::microseconds(300 * (round % 11)));
        __atomic_store_n(&pe.abort_word, 1u, __ATOMIC_RELEASE);
      }
    }
  });
}

// A peer that confirms nothing: a proxy that drains names it, and does not take the end of the time for the end.
inline void silence(WorldOptions o) {
  o.make = transports_of(o);
  o.pes = 2, o.proxy.timeout = 0.5;
  Pe talker(0, o), silent(1, o);
  const std::vector<std::string> addresses = {talker.proxy->address(), silent.proxy->address()};
  talker.proxy->connect(addresses);
  silent.proxy->connect(addresses);
  talker.proxy->start();
  queue_put(talker.context, talker.at(kSystemBytes), talker.at(kSystemBytes), 5000, 1);
  const uint64_t start = now_ns();
  CHECK(!talker.proxy->drain(20) && now_ns() - start < 15000000000ull, "it took %f s",
        (double)(now_ns() - start) * 1e-9);
  Failure f;
  CHECK(talker.proxy->failure(&f) && f.kind == "PeerLost" && f.pe == 1, "%s: %s", f.kind.c_str(), f.text.c_str());
}

// PE 0 is aborted by its host, which gives the reason a little later, or not at all. What does its peer get?
inline void reasons(const WorldOptions& o) {
  for (const std::string why : {"rank 0: its host says why", ""}) {
    World w(o);
    w.disorderly();
    __atomic_store_n(&w.pes[0]->abort_word, 1u, __ATOMIC_RELEASE);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (!why.empty()) w.pes[0]->proxy->explain(why);
    Failure f;
    const uint64_t end = now_ns() + 10000000000ull;
    while (!w.pes[1]->proxy->failure(&f) && now_ns() < end) sched_yield();
    const std::string wanted = why.empty() ? "PE 0 was aborted; look at" : "PE 0 gave up, for this reason: " + why;
    CHECK(f.kind == "PeerLost" && f.pe == 0 && f.text.find(wanted) != std::string::npos, "%s: %s", f.kind.c_str(),
          f.text.c_str());
    w.stop();
  }
  silence(o);
}

// Every PE sends put_signals that no PE waits for, and then leaves as finalize does.
inline void end_in_order(const WorldOptions& o, int round) {
  World w(o);
  constexpr int kPuts = 12;
  w.run([&](Pe& pe, int) {
    for (int i = 0; i < kPuts; i++)
      for (int d = 1; d < o.pes; d++)
        queue_put_signal(pe.context, pe.at(ending_landing(pe.rank)), pe.at(ending_landing(pe.rank)),
                         i % 3 ? kLargePut : 3000 + (uint64_t)round, (pe.rank + d) % o.pes,
                         pe.at<uint64_t>(ending_word(pe.rank)), 1, SignalOp::add);
  });
  for (auto& pe : w.pes) {
    Failure f;
    const bool drained = pe->proxy->drain(30);
    const bool failed = pe->proxy->failure(&f);
    CHECK(drained, "PE %d: not drained; %s", pe->rank, failed ? f.text.c_str() : "the proxy is well");
  }
  w.barrier();
  for (auto& pe : w.pes) pe->proxy->close();
  w.check_healthy();
}

// A drain that begins while the proxy still takes descriptors from its queue covers those too: a peer to which nothing
// had been sent until then is asked as well.
inline void drain_while_busy(WorldOptions o, int round) {
  auto hub = std::make_shared<fabric::LoopbackHub>();
  o.make = [hub](const TransportOptions& t) { return std::make_unique<fabric::Loopback>(hub, t); };
  o.pes = 3, o.rank = -1, o.proxy.timeout = 3;
  World w(o);
  Pe& pe = *w.pes[0];
  std::thread sender([&] {
    for (int i = 0; i < 400 + 40 * round; i++)
      queue_put(pe.context, pe.at(kSystemBytes), pe.at(kSystemBytes), 8 + (uint64_t)round,
                i < 396 + 40 * round ? 1 : 2);
  });
  std::this_thread::sleep_for(std::chrono::microseconds(17 * (round % 16)));
  Failure f;
  const bool drained = pe.proxy->drain(20);
  CHECK(drained, "not drained; %s", pe.proxy->failure(&f) ? f.text.c_str() : "the proxy is well");
  sender.join();
  w.check_healthy();
}

// One PE does not poll: the others together send it no more immediates than its completion queue holds, at most `most`,
// and go on later.
inline void credit(WorldOptions o, double most) {
  constexpr int kPuts = 12000;
  o.make = transports_of(o);
  o.proxy.inline_bytes = 0;
  const int away = o.pes > 2; // of three with two threads each, PE 1 has one for both others, which have one for it
                              // alone
  std::vector<std::unique_ptr<Pe>> pes;
  std::vector<std::string> addresses;
  for (int pe = 0; pe < o.pes; pe++) pes.push_back(std::make_unique<Pe>(pe, o));
  for (auto& pe : pes) addresses.push_back(pe->proxy->address());
  for (auto& pe : pes) pe->proxy->connect(addresses);
  std::vector<std::thread> kernels;
  for (auto& pe : pes) {
    if (pe->rank == away) continue;
    pe->proxy->start();
    kernels.emplace_back([&busy = *pe, away] {
      for (int i = 0; i < kPuts; i++) queue_put(busy.context, busy.at(kSystemBytes), busy.at(kSystemBytes), 64, away);
      queue_put_signal(busy.context, busy.at(kSystemBytes), busy.at(kSystemBytes), 64, away, busy.at<uint64_t>(1 << 20),
                       1, SignalOp::add);
      busy.quiet(away);
    });
  }
  double before = 0;
  for (int still = 0; still < 20; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
    double now = 0;
    for (auto& pe : pes) now += pe->rank == away ? 0 : pe->proxy->stats().at("chunks");
    still = now == before && now > 0 ? still + 1 : 0;
    before = now;
  }
  CHECK(before <= most && before >= most / 4, "%f chunks were sent to a PE that does not poll", before);
  pes[(size_t)away]->proxy->start();
  for (auto& kernel : kernels) kernel.join();
  pes[(size_t)away]->wait(1 << 20, (uint64_t)o.pes - 1);
  for (auto& pe : pes) {
    Failure f;
    CHECK(!pe->proxy->failure(&f), "%s", f.text.c_str());
  }
  for (auto& pe : pes) pe->proxy->stop();
}

// Data that are quiet have been flushed where the GPU needs it.
inline void quiet_flushes(World& w) {
  Pe& source = *w.pes[1];
  auto flushes = (unsigned (*)())dlsym(dlopen(std::getenv("TSN_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD), "fake_cuda_flushes");
  const unsigned flushed = flushes();
  queue_put(source.context, source.at(kSystemBytes), source.at(kSystemBytes), 5000, 0);
  source.quiet(0);
  CHECK(flushes() > flushed || std::getenv("FAKE_CUDA_NO_FLUSH"), "quiet before the peer's GPU sees the data");
}

// Adds to a word, left to kernels, that no wait has consumed: when the word's memory is given out again, they are
// history.
inline void adds(const WorldOptions& o) {
  World w(o);
  Pe &target = *w.pes[0], &source = *w.pes[1];
  constexpr uint64_t kWord = kSystemBytes + 1024, kOther = kSystemBytes + 2048, kMany = kSystemBytes + 8192;
  for (int i = 0; i < 5; i++) queue_signal(source.context, source.at<uint64_t>(kWord), 1, 0, SignalOp::add);
  // More than a mailbox holds.
  for (int i = 0; i < 3 * kAddMailboxEntries; i++)
    queue_signal(source.context, source.at<uint64_t>(kMany + 8ull * (uint64_t)(i % 16)), 1, 0, SignalOp::add);
  source.quiet(0);
  for (auto& pe : w.pes) CHECK(pe->proxy->apply_adds(20));
  CHECK(*target.at<uint64_t>(kWord) == 5, "%d", (int)*target.at<uint64_t>(kWord));
  for (int i = 0; i < 16; i++) CHECK(*target.at<uint64_t>(kMany + 8ull * (uint64_t)i) == 3 * kAddMailboxEntries / 16);
  *target.at<uint64_t>(kWord) = 1000; // data of another owner
  queue_signal(source.context, source.at<uint64_t>(kOther), 1, 0, SignalOp::add);
  target.wait(kOther, 1);
  CHECK(*target.at<uint64_t>(kWord) == 1000, "%d", (int)*target.at<uint64_t>(kWord));
  // And a second time, with nothing to do and with something.
  queue_signal(source.context, source.at<uint64_t>(kOther), 1, 0, SignalOp::add);
  source.quiet(0);
  for (int i = 0; i < 2; i++) CHECK(target.proxy->apply_adds(20));
  CHECK(*target.at<uint64_t>(kOther) == 2);
  if (o.cuda) quiet_flushes(w);
  w.stop();
  w.check_healthy();
}

} // namespace tsn::proxy
