// The part of a CUDA driver that maps memory of GPUs, without a GPU: memory is a file without a name, mapped with the
// checks that CUDA makes. Built as a shared library with the driver's name.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {
constexpr uint64_t kGranularity = 2 << 20;
constexpr int kInvalid = 1, kOutOfMemory = 2;
std::map<uint64_t, uint64_t> reserved, mapped; // bytes, by address
uint64_t used = 0;

bool whole(uint64_t n) { return n && n % kGranularity == 0; }
uint64_t size_of(int fd) {
  struct stat found = {};
  return fstat(fd, &found) ? 0 : (uint64_t)found.st_size;
}
} // namespace

extern "C" {
int cuGetProcAddress_v2(const char* name, void** found, int, unsigned long long, int* status) {
  static void* const self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  *found = dlsym(self, name);
  if (status) *status = *found ? 0 : 1;
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuCtxSynchronize() { return 0; }
int cuMemGetAllocationGranularity(size_t* found, const void*, int) { return *found = kGranularity, 0; }
int cuMemAddressReserve(unsigned long long* address, size_t size, size_t, unsigned long long, unsigned long long) {
  if (!whole(size)) return kInvalid;
  // More than is needed, for an address that is a multiple.
  void* at = mmap(nullptr, size + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return kOutOfMemory;
  *address = (reinterpret_cast<uint64_t>(at) + kGranularity - 1) / kGranularity * kGranularity;
  reserved[*address] = size;
  return 0;
}
int cuMemAddressFree(unsigned long long address, size_t size) {
  const auto found = reserved.find(address);
  if (found == reserved.end() || found->second != size) return kInvalid;
  const auto first = mapped.lower_bound(address);
  if (first != mapped.end() && first->first < address + size) return kInvalid; // still mapped
  reserved.erase(found);
  return munmap(reinterpret_cast<void*>(address), size), 0;
}
int cuMemCreate(unsigned long long* memory, size_t size, const void* properties, unsigned long long) {
  // Pinned memory of device 0 that is shared as a file descriptor: type, handle types, location.
  int fields[4];
  std::memcpy(fields, properties, sizeof fields);
  if (!whole(size) || fields[0] != 1 || fields[1] != 1 || fields[2] != 1 || fields[3] != 0) return kInvalid;
  const char* limit = getenv("FAKE_VMM_BYTES");
  if (limit && used + size > strtoull(limit, nullptr, 10)) return kOutOfMemory;
  const int fd = memfd_create("fake device memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return kOutOfMemory;
  used += size;
  return *memory = (unsigned long long)fd, 0;
}
int cuMemRelease(unsigned long long memory) { return close((int)memory) ? kInvalid : 0; }
int cuMemMap(unsigned long long address, size_t size, size_t offset, unsigned long long memory, unsigned long long) {
  auto range = reserved.upper_bound(address);
  if (offset || !whole(size) || address % kGranularity || size != size_of((int)memory)) return kInvalid;
  if (range == reserved.begin() || address + size > (--range)->first + range->second) return kInvalid;
  const auto next = mapped.lower_bound(address);
  if (next != mapped.end() && next->first < address + size) return kInvalid;
  if (mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)memory, 0) == MAP_FAILED)
    return kInvalid;
  return mapped[address] = size, 0;
}
int cuMemSetAccess(unsigned long long address, size_t size, const void* description, size_t count) {
  int fields[3]; // location, rights
  std::memcpy(fields, description, sizeof fields);
  const auto found = mapped.find(address);
  if (count != 1 || fields[0] != 1 || fields[1] != 0 || fields[2] != 3) return kInvalid;
  if (found == mapped.end() || found->second != size) return kInvalid;
  return mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) ? kInvalid : 0;
}
int cuMemUnmap(unsigned long long address, size_t size) {
  const auto found = mapped.find(address);
  if (found == mapped.end() || found->second != size) return kInvalid;
  mapped.erase(found);
  const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(reinterpret_cast<void*>(address), size, PROT_NONE, how, -1, 0) == MAP_FAILED ? kInvalid : 0;
}
int cuMemExportToShareableHandle(void* shared, unsigned long long memory, int kind, unsigned long long) {
  const int fd = kind == 1 ? dup((int)memory) : -1;
  return std::memcpy(shared, &fd, sizeof fd), fd < 0 ? kInvalid : 0;
}
int cuMemImportFromShareableHandle(unsigned long long* memory, void* shared, int kind) {
  const int fd = kind == 1 ? dup((int)reinterpret_cast<intptr_t>(shared)) : -1;
  return *memory = (unsigned long long)fd, fd < 0 ? kInvalid : 0;
}
int fake_vmm_left() { return (int)(reserved.size() + mapped.size()); }
}
