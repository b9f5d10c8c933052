// What the threads of one proxy hand each other when several serve one peer.
//
// A peer has one *home* thread, which alone takes its descriptors, numbers them and applies what arrives: order is kept
// there, whoever carries the data. *Helpers* post large pieces that the home gives them through endpoints of their own,
// to the peer's helpers, and tell the homes on both sides: "posted and complete" and "arrived, of this group". Since
// arrivals are counted and nothing trusts an order, it does not matter through whose endpoint a piece came.
#pragma once

#include "tilescale_net/csrc/proxy/peer_state.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace tsn::proxy {

struct Handover {
  enum Kind : uint8_t {
    piece,    // to a helper: post `op`
    complete, // to the home: `pieces` that it gave are; `op` says of what they were, and of a read the bytes
    arrived,  // to the home: a piece of op.group is in the heap
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
