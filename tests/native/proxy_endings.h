// How proxies end while much is on its way: in good order, and after a failure.
#pragma once

#include "tests/native/proxy_world.h"

#include <cstring>

namespace tsn::proxy {

constexpr uint64_t kLargePut = 800000;

// Where PE `from`'s puts of `kLargePut` bytes go, and its signal words.
inline uint64_t ending_landing(int from) { return kSystemBytes + 65536 + (uint64_t)from * (1 << 20); }
inline uint64_t ending_word(int from) { return kSystemBytes + 8ull * (uint64_t)from; }

// Every PE has large puts under way to all others when one of them gives up. Each must end by itself, with a reason.
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

// Every PE sends put_signals that nobody waits for, and then leaves as finalize does.
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
  for (auto& pe : w.pes) CHECK(pe->proxy->drain(60), "PE %d: not drained", pe->rank);
  w.barrier();
  for (auto& pe : w.pes) pe->proxy->close();
  w.check_healthy();
}

} // namespace tsn::proxy
