#include "memory.h"

namespace tsn::sim {

namespace {
struct Heap {
  uint64_t bytes;
};
struct Allocation {
  uint64_t bytes;
  std::string name;
};
std::mutex mutex;
std::map<uint64_t, Heap> heaps;
std::map<uint64_t, Allocation> allocations;

// The entry with the largest key <= address whose range holds it, or end().
template <typename Map>
typename Map::const_iterator find(const Map& map, uint64_t address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address - it->first < it->second.bytes ? it : map.end();
}
} // namespace

void register_heap(uint64_t base, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  heaps[base] = {bytes};
}

void register_allocation(uint64_t base, uint64_t bytes, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  allocations[base] = {bytes ? bytes : 1, name};
}

void unregister_allocation(uint64_t base) {
  std::lock_guard<std::mutex> lock(mutex);
  allocations.erase(base);
}

void unregister_heap(uint64_t base) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto heap = heaps.find(base);
  if (heap == heaps.end()) return;
  allocations.erase(allocations.lower_bound(base), allocations.lower_bound(base + heap->second.bytes));
  heaps.erase(heap);
}

bool in_heap(uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex);
  return find(heaps, address) != heaps.end();
}

std::string check_range(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto heap = find(heaps, address);
  if (heap == heaps.end() || bytes == 0) return "";
  const uint64_t offset = address - heap->first;
  const std::string range = concat(bytes, " bytes at heap offset ", offset);
  const auto allocation = find(allocations, address);
  if (allocation == allocations.end()) {
    auto before = allocations.upper_bound(address);
    if (before == allocations.begin() || (--before)->first < heap->first)
      return range + " lie in no live allocation of the symmetric heap";
    const uint64_t past = address - before->first - before->second.bytes;
    return concat(range, " lie in no live allocation of the symmetric heap; they begin ", past,
                  " bytes past the end of ", before->second.name, " (", before->second.bytes, " bytes at heap offset ",
                  before->first - heap->first, ")");
  }
  const uint64_t inside = address - allocation->first;
  if (bytes <= allocation->second.bytes - inside) return "";
  return concat(range, " run ", inside + bytes - allocation->second.bytes, " bytes past the end of ",
                allocation->second.name, " (", allocation->second.bytes, " bytes at heap offset ",
                allocation->first - heap->first, ")");
}

std::string describe_range(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto heap = find(heaps, address);
  const uint64_t offset = heap == heaps.end() ? 0 : address - heap->first;
  const auto allocation = find(allocations, address);
  if (allocation == allocations.end()) return concat("bytes ", offset, " to ", offset + bytes, " of the heap");
  const uint64_t inside = address - allocation->first;
  return concat("bytes ", inside, " to ", inside + bytes, " of ", allocation->second.name, " (heap offset ", offset,
                ")");
}

} // namespace tsn::sim
