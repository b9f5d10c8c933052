// Unpredictable numbers.
#pragma once

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <sys/random.h>

namespace tsn {

// From the kernel's generator. Throws std::runtime_error on an error, which Linux does not return.
inline uint64_t random_secret() {
  uint64_t value;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value)
    if (errno != EINTR) throw std::runtime_error("getrandom failed");
  return value;
}

} // namespace tsn
