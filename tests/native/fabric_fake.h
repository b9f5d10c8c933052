// The device behind fabric_fake.cpp: endpoints, a wire that reorders, and the rules it watches.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#if __has_include(<rdma/fi_ext_efa.h>)
#include <rdma/fi_ext_efa.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "efa_answers.h"

namespace {

std::string violations;
std::set<std::string> notes;        // "dmabuf", "peermem", "cuda_forbidden"
std::recursive_mutex one_at_a_time; // endpoints of several threads share one wire

size_t refusals = 0; // times that a packet found no receive

std::string text_option(const char* name, const char* otherwise) {
  const std::string text = std::string(",") + (getenv("FAKE_FABRIC") ? getenv("FAKE_FABRIC") : "") + ",";
  const std::string key = std::string(",") + name + "=";
  const size_t at = text.find(key);
  if (at == std::string::npos) return otherwise;
  const size_t begin = at + key.size();
  return text.substr(begin, text.find(',', begin) - begin);
}
long option(const char* name, long otherwise) {
  const std::string text = text_option(name, "");
  return text.empty() ? otherwise : strtol(text.c_str(), nullptr, 0);
}
void violate(const std::string& what) {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  violations += what + "\n";
  if (!option("abort", 0)) return;
  fprintf(stderr, "fake device: %s\n", what.c_str());
  abort();
}
bool direct() { return text_option("name", "efa") == "efa-direct"; }

// What the provider says of the device that is played.
const EfaAnswers& answers() {
  for (const EfaAnswers& a : kEfaAnswers)
    if (a.library == text_option("library", "2.5") && a.device == text_option("device", "p5") &&
        a.fabric == text_option("name", "efa"))
      return a;
  fprintf(stderr, "fake device: efa_answers.h has no row for FAKE_FABRIC=%s\n", getenv("FAKE_FABRIC"));
  abort();
}
size_t tx_size() { return (size_t)option("tx", (long)answers().tx_size); }
size_t rx_size() { return (size_t)option("rx", (long)answers().rx_size); }

std::mt19937_64& random_bits() {
  static std::mt19937_64 bits(option("seed", 1));
  return bits;
}

// The threading that endpoints ask for: one thread at a time in all that belongs to a domain.
struct Domain : fid_domain {
  std::atomic<bool> busy{false};
  pthread_t thread = {}; // that polled last
  int objects = 0;       // open
};
class Entered {
public:
  explicit Entered(Domain* domain) : domain_(domain) {
    if (domain_->busy.exchange(true)) violate("two threads in one domain, which is FI_THREAD_DOMAIN");
  }
  ~Entered() { domain_->busy = false; }

private:
  Domain* domain_;
};

struct Mr : fid_mr {
  Domain* domain = nullptr;
  char* base;
  size_t bytes;
  uint64_t access;
  bool enabled;
  bool late = false; // what NICs write here, kernels see after a flush
  struct Endpoint* endpoint = nullptr;
};
struct Receive {
  void *buffer, *context;
  size_t bytes;
};
struct Packet {
  enum Kind { write, read, message, inject } kind;
  struct Endpoint *from, *to;
  const char* local;
  size_t bytes;
  uint64_t remote, key, data;
  bool has_data, rung;
  void* context;
  std::string copy;
  int refused = 0;      // times that no receive was there
  bool revoked = false; // its memory was closed
};
struct Cq : fid_cq {
  Domain* domain = nullptr;
  std::deque<fi_cq_data_entry> entries;
  std::deque<fi_cq_err_entry> errors;
  size_t size;
  std::vector<struct Endpoint*> endpoints;
};
struct Av : fid_av {
  Domain* domain = nullptr;
  std::vector<uint64_t> addresses;
};
struct Endpoint : fid_ep {
  Domain* domain = nullptr;
  uint64_t address;
  Cq* cq = nullptr;
  Av* av = nullptr;
  bool enabled = false, has_eq = false;
  std::deque<Receive> receives;
  size_t outstanding = 0, tx;
  uint64_t unrung_polls = 0;
  bool retries_forever = false;                // where the receiver is not ready
  bool unsolicited = option("unsolicited", 1); // immediates take no receive, and nothing holds their sender back
};

std::vector<Endpoint*> endpoints;
size_t unrung = 0; // posts that left their doorbell to the next one
std::vector<Mr*> regions;
std::vector<Packet> wire;
uint64_t next_address = 0x1000, next_key = 0x7700;

Endpoint* find(uint64_t address) {
  for (Endpoint* e : endpoints)
    if (e->address == address) return e;
  return nullptr;
}

// `access`: rights that the region must have been registered with.
void check_local(const void* p, size_t bytes, void* desc, uint64_t access, const char* what) {
  for (Mr* mr : regions)
    if (mr == desc) {
      if ((char*)p < mr->base || (char*)p + bytes > mr->base + mr->bytes)
        violate(std::string(what) + ": memory outside its descriptor");
      if (!mr->enabled) violate(std::string(what) + ": descriptor of a region that is not enabled");
      if ((mr->access & access) != access) violate(std::string(what) + ": not registered for this");
      return;
    }
  violate(std::string(what) + ": no descriptor");
}

void complete(Endpoint* e, void* context, uint64_t flags, size_t bytes, uint64_t data) {
  if (context && answers().mode & FI_CONTEXT2) {
    auto* room = static_cast<fi_context2*>(context);
    for (void*& word : room->internal) {
      if ((flags & (FI_SEND | FI_WRITE | FI_READ)) && word != e) violate("the memory behind an operation changed");
      word = nullptr;
    }
  }
  if (e->cq->entries.size() >= e->cq->size) violate("the completion queue overran");
  e->cq->entries.push_back({context, flags, bytes, nullptr, data});
}

void fail(Endpoint* e, void* context, int error) {
  fi_cq_err_entry entry = {};
  entry.op_context = context;
  entry.err = error;
  e->cq->errors.push_back(entry);
}

// What NICs have written into memory of GPUs: kernels, here all readers, do not see it before their process has called
// cuFlushGPUDirectRDMAWrites. Other NICs do, whose reads come behind these writes.
struct Late {
  char* to;
  std::string data;
};
std::deque<Late> late_writes;

// Those of them that overlap a range take effect.
void land(const char* base, size_t bytes) {
  for (size_t i = 0; i < late_writes.size();) {
    const Late& w = late_writes[i];
    if (w.to >= base + bytes || w.to + w.data.size() <= base) {
      i++;
      continue;
    }
    memcpy(w.to, w.data.data(), w.data.size());
    late_writes.erase(late_writes.begin() + (ptrdiff_t)i);
  }
}

// A flush by the calling thread: of the memory of the PE that it polls for.
void land_flushed() {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  for (const Mr* mr : regions)
    if (mr->late && pthread_equal(mr->domain->thread, pthread_self())) land(mr->base, mr->bytes);
}

// Memory of GPUs is like that where the driver is fake_cuda.cpp, whose flushes can be seen here.
bool writes_are_late() {
  void* driver = getenv("TSN_LIBCUDA") ? dlopen(getenv("TSN_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD) : nullptr;
  auto on_flush = driver ? (void (*)(void (*)()))dlsym(driver, "fake_cuda_on_flush") : nullptr;
  if (on_flush) on_flush(land_flushed);
  return on_flush != nullptr;
}

void carry(const char* from, char* to, size_t bytes) {
  land(from, bytes);
  for (const Mr* mr : regions)
    if (mr->late && to >= mr->base && to + bytes <= mr->base + mr->bytes)
      return late_writes.push_back({to, std::string(from, bytes)});
  memcpy(to, from, bytes);
}

// Delivers one packet; false when the target has to post a receive first.
bool deliver(Packet& p) {
  if (!p.to) { // its endpoint is closed; injected messages have no context
    p.from->outstanding--;
    fail(p.from, p.context, ENOTCONN);
    return true;
  }
  if (std::find(p.to->av->addresses.begin(), p.to->av->addresses.end(), p.from->address) == p.to->av->addresses.end()) {
    violate("traffic from an address that the target has not inserted");
    return true;
  }
  if (p.revoked) {
    p.from->outstanding--;
    fail(p.from, p.context, ECANCELED);
    return true;
  }
  const bool consumes = p.kind >= Packet::message || (p.has_data && answers().wants_rx_cq_data && !p.to->unsolicited);
  if (consumes && p.to->receives.empty()) {
    refusals++;
    return false;
  }
  if (p.kind <= Packet::read) {
    Mr* target = nullptr;
    for (Mr* mr : regions)
      if (mr->key == p.key && mr->access & (p.kind == Packet::write ? FI_REMOTE_WRITE : FI_REMOTE_READ)) target = mr;
    if (!target || (char*)p.remote < target->base || (char*)p.remote + p.bytes > target->base + target->bytes) {
      p.from->outstanding--;
      fail(p.from, p.context, EACCES);
      return true;
    }
    if (p.kind == Packet::write) carry(p.local, (char*)p.remote, p.bytes);
    else carry((const char*)p.remote, const_cast<char*>(p.local), p.bytes);
  }
  Receive receive = {};
  if (consumes) {
    receive = p.to->receives.front();
    p.to->receives.pop_front();
  }
  if (p.has_data)
    complete(p.to, receive.context, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, p.bytes, p.data & 0xffffffff);
  if (p.kind >= Packet::message) {
    const char* from = p.kind == Packet::inject ? p.copy.data() : p.local;
    if (p.bytes > receive.bytes) violate("a message longer than its receive");
    memcpy(receive.buffer, from, std::min(p.bytes, receive.bytes));
    complete(p.to, receive.context, FI_MSG | FI_RECV, p.bytes, 0);
  }
  p.from->outstanding--;
  if (p.kind == Packet::inject) {
    complete(p.from, nullptr, 0, 0, 0); // takes an entry, which is not reported
  } else {
    complete(p.from, p.context,
             p.kind == Packet::write  ? FI_RMA | FI_WRITE
             : p.kind == Packet::read ? FI_RMA | FI_READ
                                      : FI_MSG | FI_SEND,
             0, 0);
  }
  return true;
}

// The receiver is not ready: the sender tries again, for a while, or for ever where it has asked for that.
bool gives_up(Packet& p) {
  if (p.from->retries_forever || ++p.refused < 100) return false;
  p.from->outstanding--;
  fail(p.from, p.context, FI_ENORX);
  return true;
}

// Some of the packets in flight arrive, in random order: on a poll of any endpoint, since a NIC needs no processor; but
// where writes are emulated, only of the target's.
void progress(Cq* cq) {
  for (Endpoint* e : cq->endpoints) {
    const bool held = std::any_of(wire.begin(), wire.end(), [&](Packet& p) { return p.from == e && !p.rung; });
    if (!held) e->unrung_polls = 0;
    else if (++e->unrung_polls == 1000) violate("a doorbell was never rung");
  }
  for (int tries = 0; tries < 4 && !wire.empty(); tries++) {
    const size_t at = random_bits()() % wire.size();
    Packet& p = wire[at];
    if (!p.rung || (option("manual", 0) && p.to && p.to->cq != cq)) continue;
    if (deliver(p) || gives_up(p)) wire.erase(wire.begin() + at);
  }
}

// Of the calls that take a message: the flags of a device without FI_FENCE.
bool more(uint64_t flags, size_t pieces) {
  const uint64_t known =
      FI_MORE | FI_COMPLETION | FI_REMOTE_CQ_DATA | (answers().grants_delivery_complete ? FI_DELIVERY_COMPLETE : 0);
  if (flags & ~known) violate("flags of an operation that the device does not know");
  if (pieces != 1) violate("an operation of several pieces; iov_limit is 1");
  return flags & FI_MORE;
}

ssize_t post(Endpoint* e, Packet p, fi_addr_t to, void* desc, bool more) {
  const Entered entered(e->domain);
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  if (!e->enabled) violate("an operation on an endpoint that is not enabled");
  if (p.bytes > (p.kind >= Packet::message ? answers().max_message : answers().max_rma)) return -FI_EMSGSIZE;
  if (p.has_data && p.data >> 32) violate("an immediate of more than 4 bytes");
  if (p.kind == Packet::inject && p.bytes > answers().inject_size)
    violate("an injected message longer than inject_size");
  if (e->outstanding >= e->tx) return -FI_EAGAIN;
  if (p.kind == Packet::inject) p.copy.assign(p.local, p.bytes);
  else {
    check_local(p.local, p.bytes, desc,
                p.kind == Packet::write  ? FI_WRITE
                : p.kind == Packet::read ? FI_READ
                                         : FI_SEND,
                "an operation's memory");
    if (!p.context) violate("no memory behind an operation");
    else if (answers().mode & FI_CONTEXT2)
      for (void*& word : static_cast<fi_context2*>(p.context)->internal) word = e;
  }
  if (to >= e->av->addresses.size()) return -FI_EINVAL;
  p.from = e;
  p.to = find(e->av->addresses[to]);
  p.rung = !more;
  if (more) unrung++;
  e->outstanding++;
  if (!more)
    for (Packet& other : wire)
      if (other.from == e) other.rung = true;
  wire.push_back(std::move(p));
  return 0;
}

} // namespace
