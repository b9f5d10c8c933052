// The events of one thread or one simulator for TSN_TRACE: a ring in a file made by Python, see trace/events.py. The
// file survives a kill of the process. The oldest events are overwritten, and count as dropped.
#pragma once

#include "tilescale_net/csrc/common/base.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tsn {

enum class TraceKind : uint16_t {
  kernel = 1,
  call,         // of a primitive, by the thread that leads it
  wait,         // a thread that waits inside a call
  host,         // a call of the package on the host
  range,        // the user's
  entry,        // the proxy took a descriptor from a queue
  transfer,     // a posted write or read until its completion
  staging,      // data filled into a staging slot
  delivered,    // a signal from another node was applied
  kernel_range, // of a kernel's author
};

constexpr uint64_t kNoWord = ~uint64_t(0);

struct TraceEvent {
  uint64_t begin_ns = 0, end_ns = 0; // CLOCK_MONOTONIC
  uint32_t name = 0;                 // number of a name
  TraceKind kind{};
  uint16_t operation = 0; // Operation of context.h, of calls and waits
  int32_t pe = -1;
  uint32_t block = 0, thread = 0;
  uint32_t line = 0;       // number of a name; 0: not known
  uint64_t word = kNoWord; // heap offset of a signal word
  uint64_t value = 0;
  uint64_t bytes = 0; // of waits: nanoseconds without progress
};
static_assert(sizeof(TraceEvent) == 64, "trace/events.py reads these 64 bytes");

// Written by one thread at a time.
class TraceRing {
public:
  // Throws std::runtime_error when the file is no ring.
  explicit TraceRing(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status = {};
    if (fd >= 0 && fstat(fd, &status) == 0) bytes_ = (size_t)status.st_size;
    void* mapped =
        bytes_ >= sizeof(Header) ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0) ::close(fd);
    if (mapped == MAP_FAILED) throw std::runtime_error("cannot map the trace " + path);
    header_ = static_cast<Header*>(mapped);
    names_ = static_cast<char*>(mapped) + sizeof(Header);
    events_ = reinterpret_cast<TraceEvent*>(names_ + header_->names_bytes);
    if (header_->magic != kMagic || !header_->capacity ||
        bytes_ != sizeof(Header) + header_->names_bytes + header_->capacity * sizeof(TraceEvent)) {
      munmap(mapped, bytes_);
      throw std::runtime_error(path + " is no trace of this version");
    }
    name(""); // number 0
  }
  ~TraceRing() { munmap(header_, bytes_); }
  TraceRing(const TraceRing&) = delete;
  TraceRing& operator=(const TraceRing&) = delete;

  // The number of a name; 0, the empty one, when it is full.
  uint32_t name(const std::string& text) {
    const auto found = numbers_.find(text);
    if (found != numbers_.end()) return found->second;
    const auto size = (uint32_t)text.size();
    if (header_->names_used + 4 + size > header_->names_bytes) return 0;
    memcpy(names_ + header_->names_used, &size, 4);
    memcpy(names_ + header_->names_used + 4, text.data(), size);
    __atomic_store_n(&header_->names_used, header_->names_used + 4 + size, __ATOMIC_RELEASE);
    return numbers_[text] = (uint32_t)numbers_.size();
  }

  void add(const TraceEvent& event) {
    const uint64_t n = header_->events;
    events_[n % header_->capacity] = event;
    __atomic_store_n(&header_->events, n + 1, __ATOMIC_RELEASE);
  }

private:
  static constexpr uint64_t kMagic = 0x3165636172545354; // "TSTrace1"
  struct Header {
    uint64_t magic, capacity, events, names_bytes, names_used, reserved[11];
  };
  static_assert(sizeof(Header) == 128, "trace/events.py reads these 128 bytes");

  size_t bytes_ = 0;
  Header* header_ = nullptr;
  char* names_ = nullptr;
  TraceEvent* events_ = nullptr;
  std::unordered_map<std::string, uint32_t> numbers_;
};

} // namespace tsn
