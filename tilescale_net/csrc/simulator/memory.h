// The symmetric heap in the simulator: its addresses and its allocations.
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn::sim {

void register_heap(uint64_t base, uint64_t bytes);
void register_allocation(uint64_t base, uint64_t bytes, const std::string& name);
void unregister_allocation(uint64_t base);
void unregister_heap(uint64_t base); // and its allocations

// Whether the address lies in a registered heap.
bool in_heap(uint64_t address);

// Empty if [address, address + bytes) lies in one live allocation, in the package's own area at the start of the
// heap, or outside every heap; else the error.
std::string check_range(uint64_t address, uint64_t bytes);

// Text of a range: its bytes and its allocation.
std::string describe_range(uint64_t address, uint64_t bytes);

} // namespace tsn::sim
