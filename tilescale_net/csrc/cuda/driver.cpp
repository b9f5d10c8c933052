
#include "tilescale_net/csrc/cuda/driver.h"
#include <cctype>
#include <dlfcn.h>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace tsn::cuda {
namespace {

template <class F>
void resolve(void* library, const char* file, F** slot, const char* name) {
  *slot = reinterpret_cast<F*>(dlsym(library, name));
  if (!*slot)
    throw CudaError(std::string(file) + " has no function " + name + "; the NVIDIA driver is older than CUDA 12.0");
}

std::string text_of(const Driver& d, Result error) {
  const char* text = nullptr;
  d.cuGetErrorString(error, &text);
  return text ? text : "unknown error";
}

Driver load() {
  const char* file = std::getenv("TSN_LIBCUDA");
  if (!file || !*file) file = "libcuda.so.1";
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw CudaError(std::string("cannot open the CUDA driver: ") + dlerror() +
                    "; install the NVIDIA driver, or keep the heap in host memory (TSN_DEVICE=simulator)");
  Driver d = {};
#define TSN_RESOLVE(name, suffix, ...) resolve(library, file, &d.name, #name suffix);
  TSN_CUDA_FUNCTIONS(TSN_RESOLVE)
#undef TSN_RESOLVE
  if (const Result result = d.cuInit(0)) throw CudaError("cuInit failed: " + text_of(d, result));
  return d;
}

} // namespace

const Driver& driver() {
  static const Driver loaded = load(); // an exception leaves it unset: the next call tries again
  return loaded;
}

bool available() {
  try {
    Device device;
    return driver().cuDeviceGet(&device, 0) == kSuccess;
  } catch (const CudaError&) {
    return false;
  }
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  throw CudaError(concat(what, " failed: ", text_of(driver(), result), " (", result, ")"));
}

PrimaryContext::PrimaryContext(int ordinal) {
  check(driver().cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  check(driver().cuCtxSetCurrent(context_), "cuCtxSetCurrent");
}

PrimaryContext::~PrimaryContext() { driver().cuDevicePrimaryCtxRelease(device_); }

RdmaVisibility rdma_visibility(int ordinal) {
  Device device;
  int ordering = 0, options = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver().cuDeviceGetAttribute(&ordering, kAttributeRdmaWritesOrdering, device), "cuDeviceGetAttribute");
  if (ordering >= kFlushToOwner) return RdmaVisibility::in_order;
  check(driver().cuDeviceGetAttribute(&options, kAttributeRdmaFlushOptions, device), "cuDeviceGetAttribute");
  return options & kRdmaFlushByHost ? RdmaVisibility::by_flush : RdmaVisibility::never;
}

int export_dmabuf(uint64_t base, uint64_t bytes, std::string* why) {
  const auto page = (uint64_t)sysconf(_SC_PAGESIZE);
  if (base % page || bytes % page) {
    *why = "the memory is not aligned to the host's pages";
    return -1;
  }
  int fd = -1;
  const Result result = driver().cuMemGetHandleForAddressRange(&fd, base, bytes, kHandleTypeDmaBufFd, 0);
  if (result == kSuccess) return fd;
  *why = "cuMemGetHandleForAddressRange: " + text_of(driver(), result);
  return -1;
}

std::string pci_address(int ordinal) {
  char text[32] = "";
  Device device;
  if (driver().cuDeviceGet(&device, ordinal) != kSuccess ||
      driver().cuDeviceGetPCIBusId(text, sizeof text, device) != kSuccess)
    return "";
  for (char* c = text; *c; c++) *c = (char)std::tolower(*c);
  return text;
}

PinnedBlock::PinnedBlock(uint64_t bytes, bool cuda) : bytes_((bytes + 4095) & ~4095ull) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(p);
  device_ = reinterpret_cast<uint64_t>(p);
  if (!cuda) return;
  try {
    const Driver& d = driver();
    check(d.cuMemHostRegister(data_, bytes_, kHostRegisterPortable | kHostRegisterDeviceMap), "cuMemHostRegister");
    pinned_ = true;
    Pointer address;
    check(d.cuMemHostGetDevicePointer(&address, data_, 0), "cuMemHostGetDevicePointer");
    device_ = address;
  } catch (...) {
    if (pinned_) driver().cuMemHostUnregister(data_);
    munmap(data_, bytes_);
    throw;
  }
}

PinnedBlock::~PinnedBlock() {
  if (pinned_) driver().cuMemHostUnregister(data_);
  munmap(data_, bytes_);
}

} // namespace tsn::cuda
