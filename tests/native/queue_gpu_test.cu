// The device queue on a GPU, against a consumer on the host: everything arrives once and whole, and how fast.
//
// usage: queue_gpu_test [pushes per thread]
// Prints one line per measurement: name, value, unit.
#include "tests/native/check.h"
#include "tilescale_net/csrc/proxy/queue.h"
#include "tilescale_net/device/proxy_ops.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

using namespace tsn;
using namespace tsn::proxy;

#define CUDA(call)                                                                                                     \
  do {                                                                                                                 \
    const cudaError_t error_ = (call);                                                                                 \
    CHECK(error_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error_));                                         \
  } while (0)

namespace {

enum Kind { kSingle, kBatch, kMixed, kRoundTrip, kFlag };

// Every thread pushes `pushes` descriptors that name it and their number.
__global__ void push(const Context* ctx, int kind, int pushes, uint64_t* flag, volatile uint64_t* answer) {
  const uint64_t me = blockIdx.x * blockDim.x + threadIdx.x;
  char* heap = (char*)ctx->heap_base;
  if (kind == kBatch) queue_publish();
  for (int i = 0; i < pushes; i++) {
    const uint64_t value = me << 32 | (uint32_t)i;
    if (kind == kBatch) {
      queue_put_signal<false>(ctx, heap + i, heap + me, i + 9, 1, (uint64_t*)heap + i, value, SignalOp::set);
    } else if (kind == kMixed && (i & 1)) {
      queue_signal(ctx, (uint64_t*)heap + i, value, 1, SignalOp::add);
    } else if (kind == kRoundTrip) {
      queue_wait(ctx, queue_flush(ctx, 1), kOpFlush, 1);
    } else if (kind == kFlag) {
      platform::store<Order::release, MemScope::sys>(flag, (uint64_t)i + 1);
      while (*answer < (uint64_t)i + 1) {
      }
    } else {
      queue_put_signal(ctx, heap + i, heap + me, i + 9, 1, (uint64_t*)heap + i, value, SignalOp::set);
    }
  }
}

struct Gpu {
  static constexpr uint32_t kCapacity = 4096;
  char* host;
  HostQueue* queue;
  Context* device_context;
  ErrorRecord* error;
  uint64_t *flag, *answer;

  Gpu() {
    const size_t bytes = HostQueue::memory_bytes(kCapacity);
    CUDA(cudaHostAlloc((void**)&host, bytes + 4096, cudaHostAllocMapped | cudaHostAllocPortable));
    memset(host, 0, bytes + 4096);
    error = (ErrorRecord*)(host + bytes);
    flag = (uint64_t*)(host + bytes + 1024);
    answer = (uint64_t*)(host + bytes + 2048);
  }
  // A fresh queue that starts at `start`.
  void reset(uint64_t start) {
    memset(host, 0, HostQueue::memory_bytes(kCapacity) + 4096);
    queue = new HostQueue(host, kCapacity, start);
    uint64_t* heap; // only its system area exists
    CUDA(cudaMalloc((void**)&heap, kSystemBytes));
    std::vector<uint64_t> initial(kSystemBytes / 8, start);
    CUDA(cudaMemcpy(heap, initial.data(), kSystemBytes, cudaMemcpyHostToDevice));
    const QueueView view =
        queue->view((uint64_t)host, (uint64_t)(heap + kQueueWords), (uint64_t)(heap + kQueueWords + kTailCacheWord));
    QueueView* device_view;
    CUDA(cudaMalloc((void**)&device_view, sizeof view));
    CUDA(cudaMemcpy(device_view, &view, sizeof view, cudaMemcpyHostToDevice));
    Context c = {};
    c.n_pes = 2;
    c.n_queues = 1;
    c.queue_share = queue_share_of(1);
    c.heap_base = (uint64_t)heap;
    c.heap_bytes = 1ull << 40;
    c.abort_word = (uint64_t)(host + HostQueue::memory_bytes(kCapacity) + 512);
    c.error = (uint64_t)error;
    c.timeout_ns = 10000000000ull;
    c.queues = (uint64_t)device_view;
    CUDA(cudaMalloc((void**)&device_context, sizeof c));
    CUDA(cudaMemcpy(device_context, &c, sizeof c, cudaMemcpyHostToDevice));
  }

  // Runs the kernel beside a consumer that checks each popped descriptor; nanoseconds per push of the whole grid.
  double run(int kind, int blocks, int threads, int pushes, uint64_t start) {
    reset(start);
    const int64_t total = (int64_t)blocks * threads * pushes;
    std::vector<int> next((size_t)(blocks * threads), 0);
    std::thread consumer([&] {
      Request r;
      for (int64_t n = 0; n < total;) {
        if (kind == kFlag) {
          const uint64_t seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
          __atomic_store_n(answer, seen, __ATOMIC_RELEASE);
          n = (int64_t)seen;
          continue;
        }
        if (!queue->pop(&r)) {
          queue->publish();
          continue;
        }
        n++;
        if (kind == kRoundTrip) {
          queue->complete(queue->position() - 1);
          continue;
        }
        const uint64_t t = r.value >> 32;
        const int i = (int)(uint32_t)r.value;
        CHECK(t < next.size() && next[t] == i, "thread %d sent %d, expected %d", (int)t, i, next[t]);
        next[t]++;
        if (r.command == Command::put_signal_set)
          CHECK(r.second == t && r.first == (uint64_t)i && r.bytes == (uint64_t)i + 9 && r.signal == 8ull * i,
                "halves of different descriptors");
        else CHECK(r.command == Command::signal_add && r.first == 8ull * i, "command %d", (int)r.command);
        if (n % 64 == 0) queue->publish();
      }
      queue->publish();
    });
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin));
    push<<<blocks, threads>>>(device_context, kind, pushes, flag, answer);
    CUDA(cudaEventRecord(end));
    CUDA(cudaDeviceSynchronize());
    consumer.join();
    CHECK(error->kind == kNoError, "device error %d", (int)error->kind);
    float ms;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e6 / (double)total;
  }
};

} // namespace

int main(int argc, char** argv) {
  const int pushes = argc > 1 ? std::atoi(argv[1]) : 20000;
  Gpu gpu;
  for (uint64_t start : {uint64_t(0), (uint64_t(1) << 32) - 3000, uint64_t(0) - 3000}) {
    for (int blocks : {1, 8, 64})
      for (int threads : {1, 32, 96, 256})
        gpu.run(kMixed, blocks, threads, std::max(16, pushes / blocks / threads), start);
  }
  auto median = [&](int kind, int threads, int n) {
    std::vector<double> v;
    for (int i = 0; i < 5; i++) v.push_back(gpu.run(kind, 1, threads, n, 0));
    std::sort(v.begin(), v.end());
    return v[2];
  };
  std::printf("one_thread_published %.3f M/s\n", 1e3 / median(kSingle, 1, pushes));
  std::printf("one_thread_batch %.3f M/s\n", 1e3 / median(kBatch, 1, pushes));
  std::printf("one_warp_published %.3f M/s\n", 1e3 / median(kSingle, 32, pushes));
  std::printf("one_warp_batch %.3f M/s\n", 1e3 / median(kBatch, 32, pushes));
  const double flag = median(kFlag, 1, pushes), trip = median(kRoundTrip, 1, pushes);
  std::printf("flag_round_trip %.3f us\nqueue_round_trip %.3f us\nratio %.3f\n", flag * 1e-3, trip * 1e-3, trip / flag);
  std::puts("ok");
  return 0;
}
