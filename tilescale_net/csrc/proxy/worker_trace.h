// The events of one proxy thread for TSN_TRACE; written by that thread.
#pragma once

#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/trace_ring.h"
#include "tilescale_net/csrc/proxy/failure.h"
#include "tilescale_net/device/descriptor.h"

#include <string>

namespace tsn::proxy {

class WorkerTrace {
public:
  // Throws std::runtime_error when the file is no ring.
  explicit WorkerTrace(const std::string& path) : ring_(path), ticks_per_ns_(ticks_per_ns()) {
    for (uint32_t c = 0; c < kCommandCount; c++) names_[c] = ring_.name(name_of((Command)c));
    slot_ = ring_.name("staging slot");
    message_ = ring_.name("message");
    delivered_ = ring_.name("signal delivered");
  }

  // A descriptor was taken from a queue.
  void entry(const Request& r) {
    TraceEvent e = now(TraceKind::entry, names_[(uint32_t)r.command % kCommandCount], r.pe == kAllPes ? -1 : (int)r.pe);
    e.bytes = r.bytes;
    e.value = r.value;
    if (r.signal) e.word = r.signal;
    ring_.add(e);
  }
  // A write or read was posted at `started` (ticks) and is complete; `id` distinguishes transfers that are under way
  // together.
  void transfer(Command command, int pe, uint64_t bytes, uint64_t started, uint32_t id) {
    TraceEvent e = since(TraceKind::transfer, names_[(uint32_t)command], pe, started);
    e.bytes = bytes;
    e.value = id;
    ring_.add(e);
  }
  // Copies into a staging slot began at `started` (ticks) and are complete.
  void staged(int pe, uint64_t bytes, uint64_t started) {
    TraceEvent e = since(TraceKind::staging, slot_, pe, started);
    e.bytes = bytes;
    ring_.add(e);
  }
  void message(int pe) { ring_.add(now(TraceKind::entry, message_, pe)); }
  // A signal of `pe` was applied to the word at this offset.
  void delivered(int pe, uint64_t word, uint64_t value) {
    TraceEvent e = now(TraceKind::delivered, delivered_, pe);
    e.word = word;
    e.value = value;
    ring_.add(e);
  }

private:
  TraceEvent now(TraceKind kind, uint32_t name, int pe) const {
    TraceEvent e;
    e.begin_ns = e.end_ns = now_ns();
    e.kind = kind;
    e.name = name;
    e.pe = pe;
    return e;
  }
  TraceEvent since(TraceKind kind, uint32_t name, int pe, uint64_t started) const {
    TraceEvent e = now(kind, name, pe);
    e.begin_ns -= (uint64_t)((double)(ticks() - started) / ticks_per_ns_);
    return e;
  }

  TraceRing ring_;
  double ticks_per_ns_;
  uint32_t names_[kCommandCount], slot_, message_, delivered_;
};

} // namespace tsn::proxy
