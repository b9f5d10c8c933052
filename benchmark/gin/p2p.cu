// NCCL's GIN as a baseline: a put-with-signal ping-pong between GPUs of different nodes, behind a C interface.
//
// Compiled by benchmark/gin against NCCL's headers; the loaded libnccl.so.2 has the host functions.
// A signal is weak: it shows its own put alone, as a put_signal's does here. GIN has no signal that is set to a value.
#include <nccl.h>
#include <nccl_device.h>

#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

namespace {

ncclComm_t comm;
ncclDevComm_t device_comm;
int gin_type;

constexpr ncclGinSignal_t kSignal = 0;

// `starts` sends first. `before`: number of signals of earlier launches.
__global__ void ping_pong(ncclDevComm dev, ncclWindow_t dst, ncclWindow_t src, size_t bytes, uint64_t before, int pe,
                          int starts, int loops) {
  ncclGin gin(dev, 0);
  const ncclTeam world = ncclTeamWorld(dev);
  const ncclCoopCta block{};
  for (int i = 1; i <= loops; i++) {
    if (!starts) gin.waitSignal(block, kSignal, before + i);
    gin.put(world, pe, dst, 0, src, 0, bytes, ncclGin_WeakSignalInc{kSignal}, ncclGin_None{}, block);
    if (starts) gin.waitSignal(block, kSignal, before + i);
  }
  gin.flush(block);
}

int failed(ncclResult_t result) { return (int)result; }

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// major * 10000 + minor * 100 + patch, of the headers
EXPORT int tsn_gin_version() { return NCCL_VERSION_CODE; }
EXPORT const char* tsn_gin_error(int code) { return ncclGetErrorString((ncclResult_t)code); }
EXPORT const char* tsn_gin_detail() { return ncclGetLastError(comm); }
EXPORT int tsn_gin_id_bytes() { return sizeof(ncclUniqueId); }
EXPORT int tsn_gin_get_id(void* id) { return failed(ncclGetUniqueId(static_cast<ncclUniqueId*>(id))); }

// Of a job; collective.
EXPORT int tsn_gin_init(const void* id, int rank, int size) {
  ncclUniqueId unique;
  memcpy(&unique, id, sizeof unique);
  if (const int code = failed(ncclCommInitRank(&comm, size, unique, rank))) return code;
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  if (const int code = failed(ncclCommQueryProperties(comm, &properties))) return code;
  gin_type = properties.ginType;
  ncclDevCommRequirements_t wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  wanted.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  wanted.ginContextCount = wanted.ginSignalCount = 1;
  wanted.ginStrongSignalsRequired = wanted.ginVaSignalsRequired = false;
  return failed(ncclDevCommCreate(comm, &wanted, &device_comm));
}

// 0: the communicator has no GIN; 2: a proxy thread carries it; 3 and above: the GPU itself does.
EXPORT int tsn_gin_type() { return gin_type; }

// Memory that GIN reaches: its address and its window. Collective.
EXPORT int tsn_gin_malloc(size_t bytes, void** pointer, void** window) {
  if (const int code = failed(ncclMemAlloc(pointer, bytes))) return code;
  return failed(
      ncclCommWindowRegister(comm, *pointer, bytes, reinterpret_cast<ncclWindow_t*>(window), NCCL_WIN_COLL_SYMMETRIC));
}

EXPORT void tsn_gin_free(void* pointer, void* window) {
  ncclCommWindowDeregister(comm, static_cast<ncclWindow_t>(window));
  ncclMemFree(pointer);
}

EXPORT int tsn_gin_ping_pong(void* dst, void* src, size_t bytes, uint64_t before, int pe, int starts, int loops,
                             int threads, cudaStream_t stream) {
  ping_pong<<<1, threads, 0, stream>>>(device_comm, static_cast<ncclWindow_t>(dst), static_cast<ncclWindow_t>(src),
                                       bytes, before, pe, starts, loops);
  return cudaGetLastError() == cudaSuccess ? 0 : (int)ncclUnhandledCudaError;
}

EXPORT void tsn_gin_finalize() {
  ncclDevCommDestroy(comm, &device_comm);
  ncclCommDestroy(comm);
}
