// The clocks of the native part: nanoseconds of the monotonic clock, and time stamps that cost a few nanoseconds.
#pragma once

#include "tilescale_net/csrc/common/base.h"

#include <ctime>

namespace tsn {

using Clock = std::chrono::steady_clock;

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A count that rises evenly; ticks_per_ns() converts.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return now_ns();
#endif
}

// Measured once against the monotonic clock, over 20 ms.
inline double ticks_per_ns() {
  static const double rate = [] {
    const uint64_t start = now_ns(), first = ticks();
    while (now_ns() - start < 20000000) {
    }
    return (double)(ticks() - first) / (double)(now_ns() - start);
  }();
  return rate;
}

inline double ticks_per_second() { return ticks_per_ns() * 1e9; }

} // namespace tsn
