// A CUDA driver without a GPU, for tests: "device memory" is host memory, streams are threads that carry out their
// operations late and in order. Built as a shared library and named in TSN_LIBCUDA.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include <fcntl.h>

namespace {

class Stream {
public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return work_.empty();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty(); });
  }

private:
  void run() {
    std::mt19937 random(7);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !work_.empty(); });
      if (work_.empty()) return;
      const auto work = work_.front();
      lock.unlock();
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
      work();
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool closing_ = false;
  std::thread thread_;
};

unsigned flushes = 0;
void (*carry_out)() = nullptr; // what NICs have written into memory of the device, and kernels do not see yet

void copy(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }
template <class T>
void store(unsigned long long to, T v) {
  __atomic_store_n(reinterpret_cast<T*>(to), v, __ATOMIC_RELEASE);
}

// Words of the device are written by kernels while the copy engine reads them: both are whole words there.
void copy_words(void* to, const void* from, size_t n) {
  if (n != 8 || reinterpret_cast<uintptr_t>(from) % 8) return copy(to, from, n);
  const uint64_t v = __atomic_load_n(static_cast<const uint64_t*>(from), __ATOMIC_ACQUIRE);
  __atomic_store_n(static_cast<uint64_t*>(to), v, __ATOMIC_RELAXED);
}

} // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuGetErrorString(int, const char** text) { return *text = "fake error", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : 101; }
// A GPU that sees the writes of NICs after a flush by the host, which FAKE_CUDA_NO_FLUSH takes away.
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return *value = attribute == 117 && !getenv("FAKE_CUDA_NO_FLUSH"), 0;
}
int cuDeviceGetPCIBusId(char* text, int bytes, int) { return std::strncpy(text, "0000:3B:00.0", (size_t)bytes), 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = context, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemHostGetDevicePointer_v2(unsigned long long* device, void* host, unsigned) {
  return *device = reinterpret_cast<unsigned long long>(host), 0;
}
int cuStreamCreate(void** stream, unsigned) { return *stream = new Stream, 0; }
int cuStreamDestroy_v2(void* stream) { return delete static_cast<Stream*>(stream), 0; }
int cuStreamSynchronize(void* stream) {
  if (stream) static_cast<Stream*>(stream)->drain();
  return 0;
}
int cuStreamQuery(void* stream) { return stream && !static_cast<Stream*>(stream)->idle() ? 600 : 0; }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t n, void* stream) {
  if (!stream) return copy(reinterpret_cast<void*>(to), from, n), 0;
  static_cast<Stream*>(stream)->add([=] { copy(reinterpret_cast<void*>(to), from, n); });
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t n, void* stream) {
  static_cast<Stream*>(stream)->add([=] { copy_words(to, reinterpret_cast<const void*>(from), n); });
  return 0;
}
int cuStreamWriteValue32_v2(void* stream, unsigned long long to, uint32_t value, unsigned flags) {
  if (flags) return 1; // this version of the call has none
  static_cast<Stream*>(stream)->add([=] { store(to, value); });
  return 0;
}
int cuStreamWriteValue64_v2(void* stream, unsigned long long to, uint64_t value, unsigned flags) {
  if (flags) return 1; // this version of the call has none
  static_cast<Stream*>(stream)->add([=] { store(to, value); });
  return 0;
}
int cuMemGetHandleForAddressRange(void* fd, unsigned long long, size_t, int, unsigned long long) {
  if (!getenv("FAKE_CUDA_DMABUF")) return 801;
  return *static_cast<int*>(fd) = open("/dev/null", O_RDONLY), 0;
}
// FAKE_CUDA_IDLE_FLUSH: it does nothing, as if it had not been called.
int cuFlushGPUDirectRDMAWrites(int, int) {
  __atomic_fetch_add(&flushes, 1, __ATOMIC_RELAXED);
  void (*const carry)() = __atomic_load_n(&carry_out, __ATOMIC_ACQUIRE);
  if (carry && !getenv("FAKE_CUDA_IDLE_FLUSH")) carry();
  return 0;
}
// For a fake NIC (fabric_fake.h): the function that flushes call.
void fake_cuda_on_flush(void (*carry)()) { __atomic_store_n(&carry_out, carry, __ATOMIC_RELEASE); }
unsigned fake_cuda_flushes() { return __atomic_load_n(&flushes, __ATOMIC_RELAXED); }
}
