// What the threads of one proxy hand each other when several serve one peer.
//
// A peer has one *home* thread, which alone takes its descriptors, numbers them and applies what arrives: it keeps the
// order, whichever thread carries the data. *Helpers* post large chunks that the home gives them through endpoints of
// their own, to the peer's helpers, and notify the homes on both sides: "posted and complete" and "arrived, of this
// group". Since arrivals are counted and nothing relies on their order, it does not matter through which endpoint a
// chunk came.
#pragma once

#include "tilescale_net/csrc/proxy/peer_state.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace tsn::proxy {

struct Handover {
  enum Kind : uint8_t {
    piece,    // to a helper: post `op`
    complete, // to the home: `pieces` chunks that it gave; `op`: their interval and, of a read, the bytes
    arrived,  // to the home: a chunk of op.group is in the heap
  };
  Kind kind;
  int pe;
  int helper = 0; // place among the peer's helpers
  uint32_t pieces = 1;
  Op op;
};

// Filled by any thread, emptied by one.
class Inbox {
public:
  void push(const Handover& item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(item);
    filled_.store(true, std::memory_order_release);
  }
  bool empty() const { return !filled_.load(std::memory_order_acquire); }
  // Everything so far; `out` is emptied first.
  void take(std::vector<Handover>* out) {
    out->clear();
    std::lock_guard<std::mutex> lock(mutex_);
    items_.swap(*out);
    filled_.store(false, std::memory_order_release);
  }

private:
  std::mutex mutex_;
  std::vector<Handover> items_;
  std::atomic<bool> filled_{false};
};

} // namespace tsn::proxy
