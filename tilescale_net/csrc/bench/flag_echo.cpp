#include "tilescale_net/csrc/bench/flag_echo.h"

#include <pthread.h>
#include <sched.h>
#include <stdexcept>
#include <string>

namespace tsn::bench {

FlagEcho::FlagEcho(bool cuda, int cpu) : memory_(2 * kPage, cuda), shares_core_(!cuda), thread_([this] { run(); }) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread_.native_handle(), sizeof set, &set) == 0) return;
  stopping_ = true;
  thread_.join();
  throw std::invalid_argument("flag echo: the thread cannot run on CPU " + std::to_string(cpu) +
                              ", which this process may not use");
}

FlagEcho::~FlagEcho() {
  stopping_ = true;
  thread_.join();
}

void FlagEcho::run() {
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

} // namespace tsn::bench
