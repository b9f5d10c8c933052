// Time stamps cheap enough to take twice per message.
#pragma once

#include <chrono>
#include <cstdint>

namespace tsn {

using Clock = std::chrono::steady_clock;

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Measured once against the steady clock, over 20 ms.
inline double ticks_per_second() {
  static const double rate = [] {
    const auto start = Clock::now();
    const uint64_t first = ticks();
    while (seconds_since(start) < 0.02) {
    }
    return static_cast<double>(ticks() - first) / seconds_since(start);
  }();
  return rate;
}

} // namespace tsn
