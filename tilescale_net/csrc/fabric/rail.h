// One rail: one endpoint with its domain, address vector and completion queue, on one NIC.
//
// Every outstanding operation holds a slot, which records the operation, so that completions need no search and
// errors are reported in the caller's terms. The number of slots bounds this side's outstanding operations;
// immediates come unrequested, and the completion queue has room for TransportOptions::immediates of them, which
// their senders must not exceed. One thread at a time uses a rail.
#pragma once

#include "tilescale_net/csrc/fabric/provider.h"
#include "tilescale_net/csrc/fabric/transport.h"
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>
#include <string>
#include <vector>

namespace tsn::fabric {

// An endpoint of libfabric with its fabric, domain, address vector and completion queue.
template <typename T>
struct FidDeleter {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using Fid = std::unique_ptr<T, FidDeleter<T>>;

class Endpoint {
protected:
  // Opens and binds all of it; the caller sets options and enables it. `check` is called with each call's result and
  // name, and throws unless it is 0. Returns the size of the completion queue: as `cq_attr` requests, or less if the
  // device has no longer ones, but at least `least`.
  template <typename Check>
  size_t open(const Library& library, fi_info* info, fi_cq_attr cq_attr, size_t least, Check check);

  // Closed in the reverse order.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> av_;
  Fid<fid_cq> cq_;
  Fid<fid_eq> eq_; // of efa alone
  Fid<fid_ep> ep_;
};

template <typename Check>
size_t Endpoint::open(const Library& library, fi_info* info, fi_cq_attr cq_attr, size_t least, Check check) {
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_av* av = nullptr;
  fid_cq* cq = nullptr;
  fid_ep* ep = nullptr;
  check(library.fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  fabric_.reset(fabric);
  check(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
  domain_.reset(domain);

  fi_av_attr av_attr = {};
  av_attr.type = info->domain_attr->av_type == FI_AV_UNSPEC ? FI_AV_TABLE : info->domain_attr->av_type;
  check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open");
  av_.reset(av);

  cq_attr.wait_obj = FI_WAIT_NONE;
  int rc = fi_cq_open(domain, &cq_attr, &cq, nullptr);
  for (; rc && cq_attr.size > least; rc = fi_cq_open(domain, &cq_attr, &cq, nullptr))
    cq_attr.size = std::max(least, cq_attr.size / 2);
  check(rc, "fi_cq_open");
  cq_.reset(cq);

  check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint");
  ep_.reset(ep);
  if (std::string(info->fabric_attr->prov_name) == "efa") {
    // Without one, the provider ends the process when a packet of its own fails, such as one to a peer that has ended.
    fid_eq* eq = nullptr;
    fi_eq_attr eq_attr = {};
    eq_attr.wait_obj = FI_WAIT_NONE;
    check(fi_eq_open(fabric, &eq_attr, &eq, nullptr), "fi_eq_open");
    eq_.reset(eq);
    check(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind (event queue)");
  }
  check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind (address vector)");
  check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind (completion queue)");
  return cq_attr.size;
}

class Rail : Endpoint {
public:
  // `index` is the rail's number in its transport. Throws FabricError.
  Rail(const Library& library, fi_info* info, const TransportOptions& options, int index, bool device_memory);
  ~Rail();
  Rail(const Rail&) = delete;

  // --- set-up ------------------------------------------------------------------------------------------------------
  std::string name() const; // the endpoint's address, opaque
  fi_addr_t insert(const std::string& name);
  // `token`: the peer expects it in messages; its own messages will carry token() of this rail.
  void expect_messages_from(int peer, uint64_t token) {
    if (static_cast<size_t>(peer) >= known_.size()) known_.resize(peer + 1, false), tokens_.resize(peer + 1, 0);
    known_[peer] = true;
    tokens_[peer] = token;
  }
  uint64_t token() const { return token_; }
  // Messages dropped because their sender did not know the token.
  uint64_t rejected_messages() const { return rejected_messages_; }
  // A registration usable by this rail, with its data for the data path.
  Fid<fid_mr> register_memory(const Memory& memory);
  uint64_t remote_base(void* base) const { return virtual_addresses_ ? reinterpret_cast<uint64_t>(base) : 0; }
  const fi_info* info() const { return info_; }
  uint32_t depth() const { return depth_; }
  uint32_t inject_bytes() const { return inject_; }
  uint32_t max_message() const { return max_message_; }
  uint64_t max_send() const { return max_send_; }
  uint64_t max_rma() const { return max_rma_; }
  uint32_t immediates() const { return immediates_; } // that the completion queue has room for
  bool emulated_write() const { return emulated_write_; }
  bool device_memory() const { return device_memory_; }
  bool is_efa() const { return std::string(info_->fabric_attr->prov_name) == "efa"; }
  // Stops all traffic; operations still outstanding are forgotten.
  void close_endpoint() { ep_.reset(); }
  bool binds_memory_to_endpoint() const { return mr_endpoint_; }

  // --- data path ---------------------------------------------------------------------------------------------------
  struct Target {
    int peer;
    fi_addr_t address;
    uint64_t remote; // in the form of the provider: an address or an offset
    uint64_t key;
  };
  Post write(const Target& to, const void* source, void* desc, const Transport::Copy& copy);
  Post read(const Target& from, void* destination, void* desc, const Transport::Copy& copy);
  Post message(int peer, fi_addr_t address, const void* data, uint32_t bytes, uint64_t cookie);
  Post send(int peer, fi_addr_t address, const void* source, void* desc, uint64_t bytes, uint64_t cookie, bool on_host);
  Post receive(void* destination, void* desc, uint64_t bytes, uint64_t cookie);
  int poll(Event* events, int capacity);
  uint64_t internal_failures(std::string* last);
  void new_poll(); // invalidates the last poll's payloads

  // No outgoing operation is outstanding.
  bool idle() const { return free_.given - free_.taken == depth_ && ready_.empty(); }

  std::string error; // why a post answered `error`

private:
  enum Kind : uint8_t { kFree, kCopy, kMessage, kReceive, kBuffer };
  struct Slot {
    uint64_t cookie;
    int32_t peer;
    Kind kind;
  };
  // Precedes the payload of every message: its sender, and the token that the receiver has given to it.
  struct Header {
    int32_t sender;
    uint32_t magic;
    uint64_t token;
  };
  static constexpr uint32_t kMagic = 0x54534e32; // "TSN2"
  static constexpr int kBatch = 32;

  std::string where() const;
  void close();
  void check(int rc, const char* call) const; // set-up calls answer 0 or a negative code
  void open(const TransportOptions& options);
  void set_endpoint_options();
  void remove_shared_memory() const;
  void allocate_slots();
  void post_buffers();
  uint64_t new_key();

  void* context(uint32_t slot) const { return contexts_ + (static_cast<size_t>(slot) << context_shift_); }
  // The slot of a completion's context; n_slots when the context is not ours.
  uint32_t slot_of(const void* context) const {
    const size_t distance = static_cast<size_t>(static_cast<const char*>(context) - contexts_);
    return distance >> context_shift_ < slots_.size() ? static_cast<uint32_t>(distance >> context_shift_)
                                                      : static_cast<uint32_t>(slots_.size());
  }
  char* buffer(uint32_t slot) { return buffers_.data() + static_cast<size_t>(slot) * buffer_bytes_; }
  // Free slots in the order of their release: the oldest is taken next, so no post waits for the memory that the
  // previous completion has just written.
  struct FreeSlots {
    std::unique_ptr<uint32_t[]> ring;
    uint32_t mask = 0, taken = 0, given = 0; // positions run on; given - taken are free
    void reset(uint32_t capacity);
    bool empty() const { return taken == given; }
    uint32_t take() { return ring[taken++ & mask]; }
    void give(uint32_t slot) { ring[given++ & mask] = slot; }
  };
  bool take(FreeSlots& free, uint32_t& slot, Kind kind, int peer, uint64_t cookie);
  void give(uint32_t slot);
  Post inject(int peer, fi_addr_t address, const void* data, size_t bytes, uint64_t cookie, const char* operation);
  [[gnu::cold]] Post post_error(ssize_t rc, const char* operation, int peer);
  Post post_result(ssize_t rc, uint32_t slot, const char* operation);
  [[gnu::noinline]] Post on_post_failed(ssize_t rc, uint32_t slot, const char* operation);
  // A write or a read with flags of its own.
  [[gnu::noinline]] Post post_message(bool read, const Target& target, const void* local, void* desc,
                                      const Transport::Copy& copy, bool more);
  int completions(const fi_cq_data_entry* entries, int count, Event* events);
  bool other_completion(const fi_cq_data_entry& entry, Event& event);
  [[gnu::cold]] bool on_cq_error(ssize_t code, Event& event);
  [[gnu::cold]] void note_internal_failure(int code, const char* reason);
  [[gnu::cold]] bool read_cq_error(Event& event);
  void repost_buffers();
  int take_ready(Event* events, int capacity);
  void recycle(uint32_t slot) {
    repost_.push_back(slot);
    needs_repost_ = true;
  }
  [[gnu::cold]] void fail(Event& event, int peer, uint64_t cookie, int code, const std::string& text);

  const Library& library_;
  fi_info* const info_; // owned by the transport's selection, which outlives the rail
  const int index_;
  const int self_;

  std::vector<char> buffers_; // bounce buffers of messages, then the pool of posted receives
  Fid<fid_mr> buffers_mr_;

  bool virtual_addresses_ = false, mr_endpoint_ = false, prov_key_ = false, wide_keys_ = false, pool_ = false,
       imm_consumes_ = false;
  bool emulated_write_ = false, device_memory_ = false, names_injected_ = true;
  uint32_t immediates_ = 0;
  uint64_t op_flags_ = 0, max_send_ = 0, max_rma_ = 0;
  uint32_t depth_ = 0, receives_ = 0, max_message_ = 0, inject_ = 0;
  size_t buffer_bytes_ = 0;
  void* buffers_desc_ = nullptr;

  std::vector<Slot> slots_;      // [0, depth): outgoing operations; from depth on: posted receives
  FreeSlots free_;               // for outgoing operations
  FreeSlots free_receives_;      // for receives, when the caller posts its own
  bool needs_repost_ = false;    // new_poll() has something to do
  std::vector<uint32_t> repost_; // pool buffers to post again: handed out by the last poll, or refused before
  const uint64_t token_ = random_secret();
  std::vector<uint64_t> tokens_; // of the peers
  uint64_t rejected_messages_ = 0, internal_failures_ = 0;
  std::string internal_failure_;  // the latest
  std::vector<bool> known_;       // peers whose messages are accepted
  std::vector<Event> ready_;      // completions of injected messages, which the provider does not report
  std::deque<std::string> texts_; // of failures handed out by the last poll
  char* contexts_ = nullptr;
  std::vector<fi_context2> context_storage_;
  int context_shift_ = 0;
};

} // namespace tsn::fabric

// The data path of a rail: posting and polling. Inline, so that a transport's calls and its rails' are compiled in one
// piece: at ten million operations a second a call is one percent.

#define TSN_HOT [[gnu::always_inline]] inline

namespace tsn::fabric {

TSN_HOT bool Rail::take(FreeSlots& free, uint32_t& slot, Kind kind, int peer, uint64_t cookie) {
  if (__builtin_expect(free.empty(), 0)) return false;
  slot = free.take();
  slots_[slot] = Slot{cookie, peer, kind};
  return true;
}

TSN_HOT void Rail::give(uint32_t slot) {
  slots_[slot].kind = kFree;
  (slot < depth_ ? free_ : free_receives_).give(slot);
}

TSN_HOT Post Rail::post_result(ssize_t rc, uint32_t slot, const char* operation) {
  return __builtin_expect(rc == 0, 1) ? Post::ok : on_post_failed(rc, slot, operation);
}

TSN_HOT Post Rail::write(const Target& to, const void* source, void* desc, const Transport::Copy& copy) {
  // A doorbell may only wait when the post that will ring it has a slot.
  const bool more = copy.more && free_.given - free_.taken > 1;
  if (more || copy.source_only) return post_message(false, to, source, desc, copy, more);
  uint32_t slot;
  if (!take(free_, slot, kCopy, to.peer, copy.cookie)) return Post::again;
  const ssize_t rc =
      copy.has_imm
          ? fi_writedata(ep_.get(), source, copy.bytes, desc, copy.imm, to.address, to.remote, to.key, context(slot))
          : fi_write(ep_.get(), source, copy.bytes, desc, to.address, to.remote, to.key, context(slot));
  return post_result(rc, slot, "a write");
}

TSN_HOT Post Rail::read(const Target& from, void* destination, void* desc, const Transport::Copy& copy) {
  if (copy.more && free_.given - free_.taken > 1) return post_message(true, from, destination, desc, copy, true);
  uint32_t slot;
  if (!take(free_, slot, kCopy, from.peer, copy.cookie)) return Post::again;
  return post_result(
      fi_read(ep_.get(), destination, copy.bytes, desc, from.address, from.remote, from.key, context(slot)), slot,
      "a read");
}

// Turns completions into events; returns the number of those for the caller. The loop keeps its variables in
// registers: the compiler must assume that an event could lie anywhere.
TSN_HOT int Rail::completions(const fi_cq_data_entry* entries, int count, Event* events) {
  Slot* const slots = slots_.data();
  uint32_t* const ring = free_.ring.get();
  const uint32_t depth = depth_, mask = free_.mask;
  const int32_t rail = index_;
  uint32_t given = free_.given;
  Event* out = events;
  for (const fi_cq_data_entry* entry = entries; entry != entries + count; ++entry) {
    const uint32_t slot = slot_of(entry->op_context);
    if (__builtin_expect(slot >= depth || (entry->flags & FI_REMOTE_CQ_DATA) || slots[slot].kind == kFree, 0)) {
      free_.given = given;
      out += other_completion(*entry, *out);
      given = free_.given;
      continue;
    }
    const uint64_t cookie = slots[slot].cookie;
    out->kind = Event::done;
    out->peer = slots[slot].peer;
    out->rail = rail;
    out->cookie = cookie;
    slots[slot].kind = kFree;
    ring[given++ & mask] = slot;
    out += cookie != kSilent;
  }
  free_.given = given;
  return static_cast<int>(out - events);
}

TSN_HOT void Rail::new_poll() {
  if (__builtin_expect(needs_repost_, 0)) repost_buffers();
}

TSN_HOT int Rail::poll(Event* events, int capacity) {
  int n = __builtin_expect(ready_.empty(), 1) ? 0 : take_ready(events, capacity);
  while (n < capacity) {
    fi_cq_data_entry entries[kBatch];
    const int room = capacity - n < kBatch ? capacity - n : kBatch;
    const ssize_t got = fi_cq_read(cq_.get(), entries, room);
    if (got <= 0) {
      if (__builtin_expect(got == -FI_EAGAIN || got == 0, 1)) break;
      if (!on_cq_error(got, events[n])) break;
      ++n;
      if (got != -FI_EAVAIL) break;
      continue;
    }
    n += completions(entries, static_cast<int>(got), events + n);
    if (got < room) break;
  }
  return n;
}

} // namespace tsn::fabric
