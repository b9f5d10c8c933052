// The functions of the CUDA driver for the native code, loaded from libcuda.so.1 on first use.
//
// Building needs no CUDA headers: the types below have the driver ABI's sizes, and every prototype is ours.
#pragma once

#include "tilescale_net/csrc/common/base.h"

namespace tsn {

class CudaError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

namespace cuda {

using Result = int; // CUresult; 0 is success
using Device = int;
using Context = void*;
using Stream = void*;
using Pointer = unsigned long long; // CUdeviceptr

constexpr Result kSuccess = 0;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr int kAttributeRdmaWritesOrdering = 118; // 0: flush needed, 100: the owner sees writes in order, 200: all do
constexpr int kAttributeRdmaFlushOptions = 117;   // bit 0: cuFlushGPUDirectRDMAWrites works on the host
constexpr int kRdmaFlushByHost = 1;
constexpr int kHandleTypeDmaBufFd = 1;
constexpr int kFlushTargetCurrentContext = 0;
constexpr int kFlushToOwner = 100;

// X(function, suffix of its exported name, parameters): the _v2 names are the ones that cuda.h maps the plain ones to.
// clang-format off
#define TSN_CUDA_FUNCTIONS(X) \
  X(cuInit, "", unsigned flags) \
  X(cuGetErrorString, "", Result error, const char** text) \
  X(cuDeviceGet, "", Device* device, int ordinal) \
  X(cuDeviceGetAttribute, "", int* value, int attribute, Device device) \
  X(cuDeviceGetPCIBusId, "", char* text, int bytes, Device device) \
  X(cuDevicePrimaryCtxRetain, "", Context* context, Device device) \
  X(cuDevicePrimaryCtxRelease, "_v2", Device device) \
  X(cuCtxSetCurrent, "", Context context) \
  X(cuMemHostRegister, "_v2", void* p, size_t bytes, unsigned flags) \
  X(cuMemHostUnregister, "", void* p) \
  X(cuMemHostGetDevicePointer, "_v2", Pointer* device, void* host, unsigned flags) \
  X(cuStreamCreate, "", Stream* stream, unsigned flags) \
  X(cuStreamDestroy, "_v2", Stream stream) \
  X(cuStreamSynchronize, "", Stream stream) \
  X(cuStreamQuery, "", Stream stream) \
  X(cuMemcpyHtoDAsync, "_v2", Pointer to, const void* from, size_t bytes, Stream stream) \
  X(cuMemcpyDtoHAsync, "_v2", void* to, Pointer from, size_t bytes, Stream stream) \
  X(cuStreamWriteValue32, "_v2", Stream stream, Pointer to, uint32_t value, unsigned flags) \
  X(cuStreamWriteValue64, "_v2", Stream stream, Pointer to, uint64_t value, unsigned flags) \
  X(cuMemGetHandleForAddressRange, "", void* handle, Pointer p, size_t bytes, int type, unsigned long long flags) \
  X(cuFlushGPUDirectRDMAWrites, "", int target, int scope)
// clang-format on

struct Driver {
#define TSN_CUDA_FIELD(name, suffix, ...) Result (*name)(__VA_ARGS__);
  TSN_CUDA_FUNCTIONS(TSN_CUDA_FIELD)
#undef TSN_CUDA_FIELD
};

// The driver, loaded from TSN_LIBCUDA or libcuda.so.1 and initialised on the first call. Throws CudaError that names
// the missing file or function.
const Driver& driver();

// Whether driver() would succeed and sees a device.
bool available();

// Throws CudaError "<what>: <the driver's text>" unless `result` is success.
void check(Result result, const char* what);

// Makes the primary context of device `ordinal` current in this thread for the lifetime of the object.
class PrimaryContext {
public:
  explicit PrimaryContext(int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  Device device() const { return device_; }

private:
  Device device_ = 0;
  Context context_ = nullptr;
};

// How a NIC's writes to GPU memory become visible to running kernels.
enum class RdmaVisibility {
  in_order, // no action: the GPU sees such writes in order
  by_flush, // after cuFlushGPUDirectRDMAWrites
  never,    // not while a kernel runs
};
RdmaVisibility rdma_visibility(int ordinal);

// A file descriptor of a DMA buffer over GPU memory, for registration with a NIC; the caller closes it. -1 with `why`
// when the driver or the GPU has no DMA buffers. Needs a current context.
int export_dmabuf(uint64_t base, uint64_t bytes, std::string* why);

// "0000:3b:00.0" of device `ordinal`, in lower case; "" when it cannot be read.
std::string pci_address(int ordinal);

} // namespace cuda
} // namespace tsn

namespace tsn::cuda {

// Host memory that a device reaches.
// Page-aligned zeroed host memory, pinned for the device when there is one.
class PinnedBlock {
public:
  PinnedBlock(uint64_t bytes, bool cuda);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t device() const { return device_; } // the device's address of data(); the same address without a device

private:
  char* data_;
  uint64_t bytes_;
  uint64_t device_;
  bool pinned_ = false;
};

} // namespace tsn::cuda
