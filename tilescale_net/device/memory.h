// Loads and stores with an explicit order and scope, of 1, 2, 4 or 8 bytes.
#pragma once

#include "put.h"

namespace tsn {

template <Order O, MemScope S, class T>
TSN_DEVICE T ld(const T* p) {
  if constexpr (platform::kDefersRemoteWrites) platform::before_ld<O>(), platform::reach(p, false);
  const T v = platform::load<O, S>(p);
  if constexpr (platform::kDefersRemoteWrites) platform::after_ld<O, S>(p);
  return v;
}

template <Order O, MemScope S, class T>
TSN_DEVICE void st(T* p, typename Value<T>::type v) {
  if constexpr (platform::kDefersRemoteWrites) platform::reach(p, true), platform::before_st<O, S>(p);
  platform::store<O, S>(p, v);
}

// Declares that accesses to these bytes, and to the bytes at the same place in other PEs' heaps, are meant to race. For
// race detectors only.
TSN_DEVICE void benign_race(const Context*, const void* p, int64_t bytes) {
  if constexpr (platform::kDefersRemoteWrites) platform::benign_race(p, bytes);
}

} // namespace tsn
