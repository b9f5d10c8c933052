// The NVSHMEM baseline: block-scope put and get, and a put-with-signal ping-pong, behind a C interface.
//
// Compiled by benchmark/nvshmem into a shared library that links NVSHMEM's device library statically. A push ends with
// a quiet by one thread, as ours does; NVSHMEM's get returns with the data in place.
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// From 3.7 on, NVSHMEM can move data by TMA when NVSHMEM_TMA_POLICY=ENABLE and the kernel lends it shared memory.
#define HAS_TMA (NVSHMEM_VENDOR_MAJOR_VERSION * 100 + NVSHMEM_VENDOR_MINOR_VERSION >= 307)

namespace {

__device__ void lend(void* shared, int bytes) {
#if HAS_TMA
  if (bytes > 0) nvshmemx_give_smem(shared, bytes);
  __syncthreads();
#endif
}

__device__ void take_back(int bytes) {
#if HAS_TMA
  __syncthreads();
  if (bytes > 0) nvshmemx_release_smem();
#endif
}

// This block's contiguous part of [0, bytes), in units of 16 bytes.
__device__ void part_of_block(size_t bytes, size_t* first, size_t* count) {
  const size_t part = (bytes / gridDim.x + 15) & ~size_t(15);
  *first = min(part * blockIdx.x, bytes);
  *count = min(part, bytes - *first);
}

template <bool push>
__global__ void copy(char* dst, const char* src, size_t bytes, int pe, int loops, int lent) {
  extern __shared__ __align__(128) char shared[];
  size_t first, count;
  part_of_block(bytes, &first, &count);
  lend(shared, lent);
  for (int i = 0; i < loops; i++)
    if (push) nvshmemx_putmem_block(dst + first, src + first, count, pe);
    else nvshmemx_getmem_block(dst + first, src + first, count, pe);
  if (push) {
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();
  }
  take_back(lent);
}

// `starts` sends first; the values of the round trips are base + 1 … base + loops.
__global__ void ping_pong(char* dst, const char* src, size_t bytes, uint64_t* signal, uint64_t base, int pe, int starts,
                          int loops, int lent) {
  extern __shared__ __align__(128) char shared[];
  lend(shared, lent);
  for (int i = 1; i <= loops; i++) {
    const uint64_t value = base + i;
    if (!starts) {
      if (threadIdx.x == 0) nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, value);
      __syncthreads();
    }
    nvshmemx_putmem_signal_block(dst, src, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe);
    if (starts) {
      if (threadIdx.x == 0) nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, value);
      __syncthreads();
    }
  }
  take_back(lent);
}

int shared_bytes() {
#if HAS_TMA
  const char* policy = getenv("NVSHMEM_TMA_POLICY");
  if (policy && strcmp(policy, "ENABLE") == 0) return nvshmemx_ask_smem(NVSHMEMX_SMEM_RECOMMENDED);
#endif
  return 0;
}

// Launches a kernel whose last argument is the shared memory that it lends.
template <class Kernel, class... Arguments>
int launch(Kernel* kernel, int blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  const int lent = shared_bytes();
  if (lent > 48 * 1024)
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, lent)) return e;
  kernel<<<blocks, threads, lent, stream>>>(arguments..., lent);
  return cudaGetLastError();
}

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// major * 10000 + minor * 100 + patch
EXPORT int tsn_nvshmem_version() {
  return NVSHMEM_VENDOR_MAJOR_VERSION * 10000 + NVSHMEM_VENDOR_MINOR_VERSION * 100 + NVSHMEM_VENDOR_PATCH_VERSION;
}
EXPORT int tsn_nvshmem_lent() { return shared_bytes(); }
EXPORT const char* tsn_nvshmem_error(int code) { return cudaGetErrorString((cudaError_t)code); }

EXPORT int tsn_nvshmem_id_bytes() { return sizeof(nvshmemx_uniqueid_t); }

EXPORT int tsn_nvshmem_get_id(void* id) {
  const nvshmemx_uniqueid_t initial = NVSHMEMX_UNIQUEID_INITIALIZER;
  memcpy(id, &initial, sizeof(initial));
  return nvshmemx_get_uniqueid(static_cast<nvshmemx_uniqueid_t*>(id));
}

EXPORT int tsn_nvshmem_init(const void* id, int rank, int size, int device) {
  if (cudaSetDevice(device) != cudaSuccess) return -1;
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int failed =
      nvshmemx_set_attr_uniqueid_args(rank, size, static_cast<const nvshmemx_uniqueid_t*>(id), &attributes);
  return failed ? failed : nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

EXPORT void tsn_nvshmem_finalize() { nvshmem_finalize(); }
EXPORT void* tsn_nvshmem_malloc(size_t bytes) { return nvshmem_malloc(bytes); }
EXPORT void tsn_nvshmem_free(void* pointer) { nvshmem_free(pointer); }

EXPORT int tsn_nvshmem_put(void* dst, const void* src, size_t bytes, int pe, int loops, int blocks, int threads,
                           cudaStream_t stream) {
  return launch(copy<true>, blocks, threads, stream, (char*)dst, (const char*)src, bytes, pe, loops);
}

EXPORT int tsn_nvshmem_get(void* dst, const void* src, size_t bytes, int pe, int loops, int blocks, int threads,
                           cudaStream_t stream) {
  return launch(copy<false>, blocks, threads, stream, (char*)dst, (const char*)src, bytes, pe, loops);
}

EXPORT int tsn_nvshmem_ping_pong(void* dst, const void* src, size_t bytes, uint64_t* signal, uint64_t base, int pe,
                                 int starts, int loops, int threads, cudaStream_t stream) {
  return launch(ping_pong, 1, threads, stream, (char*)dst, (const char*)src, bytes, signal, base, pe, starts, loops);
}
