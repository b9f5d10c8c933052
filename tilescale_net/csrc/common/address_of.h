// An address as a number, to compute with.
#pragma once

#include <cstdint>

namespace tsn {

inline uint64_t address_of(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

} // namespace tsn
