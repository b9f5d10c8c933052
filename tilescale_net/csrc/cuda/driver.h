// The functions of the CUDA driver for the native code, loaded from libcuda.so.1 on first use.
//
// Building needs no CUDA headers: the types below have the driver ABI's sizes, and every prototype is ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

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

struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuGetErrorString)(Result error, const char** text);
  Result (*cuDeviceGet)(Device* device, int ordinal);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*cuDeviceGetPCIBusId)(char* text, int bytes, Device device);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*cuDevicePrimaryCtxRelease)(Device device);
  Result (*cuCtxSetCurrent)(Context context);
  Result (*cuMemHostRegister)(void* p, size_t bytes, unsigned flags);
  Result (*cuMemHostUnregister)(void* p);
  Result (*cuMemHostGetDevicePointer)(Pointer* device, void* host, unsigned flags);
  Result (*cuStreamCreate)(Stream* stream, unsigned flags);
  Result (*cuStreamDestroy)(Stream stream);
  Result (*cuStreamSynchronize)(Stream stream);
  Result (*cuStreamQuery)(Stream stream);
  Result (*cuMemcpyHtoDAsync)(Pointer to, const void* from, size_t bytes, Stream stream);
  Result (*cuMemcpyDtoHAsync)(void* to, Pointer from, size_t bytes, Stream stream);
  Result (*cuStreamWriteValue32)(Stream stream, Pointer to, uint32_t value, unsigned flags);
  Result (*cuStreamWriteValue64)(Stream stream, Pointer to, uint64_t value, unsigned flags);
  Result (*cuMemGetHandleForAddressRange)(void* handle, Pointer p, size_t bytes, int type, unsigned long long flags);
  Result (*cuFlushGPUDirectRDMAWrites)(int target, int scope);
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
