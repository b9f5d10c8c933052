// Values as machine words, for atomics and registers that know integers only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tsn {

template <size_t bytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint64_t;
};
// The unsigned integer of T's size.
template <class T>
using WordOf = typename Word<sizeof(T)>::type;

} // namespace tsn
