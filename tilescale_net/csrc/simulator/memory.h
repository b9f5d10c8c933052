// The symmetric heap in the simulator: where it is, and which parts of it are allocated.
#pragma once

#include <stdint.h>
#include <string>

namespace tsn::sim {

void register_heap(uint64_t base, uint64_t bytes);
void register_allocation(uint64_t base, uint64_t bytes, const std::string& name);
void unregister_allocation(uint64_t base);
void unregister_heap(uint64_t base); // and what was allocated in it

// Whether the address lies in a registered heap.
bool in_heap(uint64_t address);

// Empty when [address, address + bytes) lies in one live allocation, in the package's own area at the start of the
// heap, or outside every heap; else what is wrong.
std::string check_range(uint64_t address, uint64_t bytes);

// The range in words: which bytes of which allocation.
std::string describe_range(uint64_t address, uint64_t bytes);

} // namespace tsn::sim
