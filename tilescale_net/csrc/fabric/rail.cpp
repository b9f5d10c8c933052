// Set-up of a rail, its memory, and the out-of-line part of its data path.
#include "tilescale_net/csrc/fabric/rail.h"
#include "tilescale_net/csrc/common/text.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/provider.h"
#include <algorithm>
#include <arpa/inet.h>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <rdma/fi_ext.h>
#include <sys/mman.h>
#include <unistd.h>

namespace tsn::fabric {
namespace {

// Options of endpoints by number, which is part of the library's interface: a build with older headers than the
// library's must set them, too. Their names are FI_OPT_EFA_RNR_RETRY, …_EMULATED_WRITE, …_USE_UNSOLICITED_WRITE_RECV,
// FI_OPT_CUDA_API_PERMITTED, …_MAX_MSG_SIZE, …_MAX_RMA_SIZE and …_INJECT_MSG_SIZE.
constexpr int kEfa = -(0xefa << 16), kRnrRetry = kEfa, kEmulatedWrite = kEfa + 2, kUnsolicitedWriteReceives = kEfa + 8;
constexpr int kCudaApiPermitted = 10, kMaxMsgSize = 12, kMaxRmaSize = 14, kInjectMsgSize = 16;
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(2, 0)
static_assert(kRnrRetry == FI_OPT_EFA_RNR_RETRY && kEmulatedWrite == FI_OPT_EFA_EMULATED_WRITE &&
              kCudaApiPermitted == FI_OPT_CUDA_API_PERMITTED && kMaxMsgSize == FI_OPT_MAX_MSG_SIZE &&
              kMaxRmaSize == FI_OPT_MAX_RMA_SIZE && kInjectMsgSize == FI_OPT_INJECT_MSG_SIZE);
#endif

} // namespace

std::string Rail::where() const {
  return "provider '" + provider_name(info_) + "', interface '" + std::string(info_->domain_attr->name) + "'";
}

void Rail::check(int rc, const char* call) const {
  if (rc) throw FabricError(std::string(call) + " failed on " + where() + ": " + library_.error(rc));
}

Rail::Rail(const Library& library, fi_info* info, const TransportOptions& options, int index, bool device_memory)
    : library_(library), info_(info), index_(index), self_(options.rank), device_memory_(device_memory) {
  const int modes = info->domain_attr->mr_mode;
  virtual_addresses_ = modes & FI_MR_VIRT_ADDR;
  prov_key_ = modes & FI_MR_PROV_KEY;
  mr_endpoint_ = modes & FI_MR_ENDPOINT;
  wide_keys_ = info->domain_attr->mr_key_size >= sizeof(uint64_t);
  imm_consumes_ = info->mode & FI_RX_CQ_DATA;
  op_flags_ = info->tx_attr->op_flags & FI_DELIVERY_COMPLETE;
  pool_ = options.message_buffers > 0;
  info->rx_attr->op_flags = 0;

  const auto limit = [](uint32_t wanted, size_t offered) {
    return static_cast<uint32_t>(std::max<size_t>(1, std::min<size_t>(wanted, offered ? offered : wanted)));
  };
  depth_ = limit(options.depth, info->tx_attr->size);
  // If immediates take receives, post one for each that peers may send: EFA restarts a write without one.
  const uint32_t immediates = imm_consumes_ ? options.immediates : 0;
  receives_ = limit(pool_ ? options.message_buffers + immediates : options.depth, info->rx_attr->size);
  // EFA reports the failure of an injected message without its context, and so without its peer.
  names_injected_ = !is_efa();
  inject_ = static_cast<uint32_t>(info->tx_attr->inject_size);
  max_send_ = max_rma_ = info->ep_attr->max_msg_size;
  const size_t largest = std::min<size_t>(options.message_bytes + sizeof(Header), info->ep_attr->max_msg_size);
  max_message_ = pool_ ? static_cast<uint32_t>(largest - sizeof(Header)) : 0;
  buffer_bytes_ = (largest + 63) / 64 * 64;

  open(options);
  allocate_slots();
  check(fi_enable(ep_.get()), "fi_enable");
  if (is_efa()) remove_shared_memory();
  if (buffers_mr_ && mr_endpoint_) {
    check(fi_mr_bind(buffers_mr_.get(), &ep_->fid, 0), "fi_mr_bind");
    check(fi_mr_enable(buffers_mr_.get()), "fi_mr_enable");
  }
  post_buffers();
  if (error.empty()) return;
  close();
  throw FabricError("posting receives failed on " + where() + ": " + error);
}

Rail::~Rail() { close(); }

void Rail::close() {
  // Registrations bound to an endpoint must go before it; others may still be in use until it is gone.
  if (mr_endpoint_) buffers_mr_.reset();
  ep_.reset();
  buffers_mr_.reset();
}

void Rail::open(const TransportOptions& options) {
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  // Immediates arrive unrequested: room for them beyond this side's outstanding operations, unless they take receives.
  const bool take_receives = pool_ && imm_consumes_;
  const uint32_t for_messages = take_receives ? std::min(options.message_buffers, (receives_ + 1) / 2) : receives_;
  const uint32_t ours = depth_ + for_messages;
  cq_attr.size = take_receives ? depth_ + receives_ : ours + options.immediates;
  const size_t room =
      Endpoint::open(library_, info_, cq_attr, ours + 1, [this](int rc, const char* call) { check(rc, call); });
  if (take_receives) receives_ = static_cast<uint32_t>(std::min<size_t>(receives_, room - depth_));
  immediates_ = take_receives ? receives_ - for_messages
                              : static_cast<uint32_t>(std::min<size_t>(options.immediates, room - ours));
  set_endpoint_options();
}

// Options that only hardware providers know; older libraries reject them.
void Rail::set_endpoint_options() {
  const auto set = [&](int name, const auto& value) {
    return fi_setopt(&ep_->fid, FI_OPT_ENDPOINT, name, &value, sizeof value);
  };
  const auto get = [&](int name, auto* value) {
    size_t bytes = sizeof *value;
    return fi_getopt(&ep_->fid, FI_OPT_ENDPOINT, name, value, &bytes) == 0;
  };
  const bool efa = is_efa();
  // A write's immediate takes a posted receive, so that an unread queue stops the sender.
  if (efa && imm_consumes_) set(kUnsolicitedWriteReceives, false);
  // A kernel that waits for a put would deadlock with a provider that calls CUDA in its data path: forbid it, and use
  // staging if the provider needs it. An unknown option means an old provider: keep it.
  if (device_memory_) {
    const int rc = set(kCudaApiPermitted, false);
    if (rc == -FI_EOPNOTSUPP || rc == -FI_EINVAL) device_memory_ = false;
  }
  if (!efa) return;
  set(kRnrRetry, size_t{7}); // SRD retries "receiver not ready" without end: flow control instead of an error
  bool emulated = true;      // libfabric before 1.18 has no RDMA write, and not this option
  emulated_write_ = !get(kEmulatedWrite, &emulated) || emulated;
  // Where the limits of messages and of RMA differ, the endpoint's attributes have only the larger one.
  size_t limit = 0;
  if (get(kMaxMsgSize, &limit) && limit) max_send_ = limit;
  if (get(kMaxRmaSize, &limit) && limit) max_rma_ = limit;
  if (get(kInjectMsgSize, &limit)) inject_ = static_cast<uint32_t>(std::min<size_t>(inject_, limit));
}

// libfabric 1.17 makes an object for peers of this host even if told not to use it, and a killed process leaves it
// behind. Its name contains the endpoint's GID, queue pair, key, and the user.
void Rail::remove_shared_memory() const {
  struct {
    unsigned char gid[16];
    uint16_t qp, pad;
    uint32_t key;
  } address;
  const std::string own = name();
  if (own.size() < sizeof address) return;
  std::memcpy(&address, own.data(), sizeof address);
  char gid[INET6_ADDRSTRLEN] = "", object[NAME_MAX];
  if (!inet_ntop(AF_INET6, address.gid, gid, sizeof gid)) return;
  snprintf(object, sizeof object, "/%s_%04x_%08x_%04x", gid, address.qp, address.key, getuid());
  shm_unlink(object);
}

void Rail::FreeSlots::reset(uint32_t capacity) {
  uint32_t size = 1;
  while (size < capacity) size *= 2;
  ring.reset(new uint32_t[size]);
  mask = size - 1;
}

void Rail::allocate_slots() {
  const uint32_t total = depth_ + receives_;
  slots_.assign(total, Slot{kSilent, -1, kFree});
  free_.reset(depth_);
  for (uint32_t i = 0; i < depth_; ++i) free_.give(i);
  free_receives_.reset(receives_);
  if (!pool_)
    for (uint32_t i = depth_; i < total; ++i) free_receives_.give(i);

  // Providers that keep state in the operation's context need real memory there.
  if (info_->mode & (FI_CONTEXT | FI_CONTEXT2)) {
    context_storage_.resize(total);
    contexts_ = reinterpret_cast<char*>(context_storage_.data());
    context_shift_ = 6;
    static_assert(sizeof(fi_context2) == 64, "contexts are 64 bytes apart");
  } else {
    contexts_ = reinterpret_cast<char*>(slots_.data()); // never followed: only the distance counts
  }

  if (!pool_) return;
  for (uint32_t i = total; i-- > depth_;) repost_.push_back(i);
  buffers_.resize(total * buffer_bytes_);
  if (!(info_->domain_attr->mr_mode & FI_MR_LOCAL)) return;
  fi_mr_attr attr = {};
  iovec iov = {buffers_.data(), buffers_.size()};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = FI_SEND | FI_RECV;
  attr.requested_key = new_key();
  fid_mr* mr = nullptr;
  check(fi_mr_regattr(domain_.get(), &attr, 0, &mr), "fi_mr_regattr (message buffers)");
  buffers_mr_.reset(mr);
  buffers_desc_ = fi_mr_desc(mr);
}

// A process with a key can write to the memory: if we choose the key and it is wide enough, it is unpredictable.
uint64_t Rail::new_key() {
  static std::atomic<uint64_t> next{1};
  if (prov_key_) return 0;
  return wide_keys_ ? random_secret() >> 1 : next++; // some providers keep the highest bit for themselves
}

std::string Rail::name() const {
  size_t bytes = 0;
  fi_getname(&ep_->fid, nullptr, &bytes); // answers -FI_ETOOSMALL and the size
  std::string name(std::max<size_t>(bytes, 1), '\0');
  check(fi_getname(&ep_->fid, &name[0], &bytes), "fi_getname");
  name.resize(bytes);
  return name;
}

fi_addr_t Rail::insert(const std::string& name) {
  fi_addr_t address = FI_ADDR_UNSPEC;
  const int n = fi_av_insert(av_.get(), name.data(), 1, &address, 0, nullptr);
  if (n != 1)
    throw FabricError("fi_av_insert failed on " + where() + ": " +
                      (n < 0 ? library_.error(n) : std::string("the address was not accepted")));
  return address;
}

// Registration of memory with a rail: host memory, GPU memory as a DMABUF, GPU memory through the peer-memory module.
namespace {

// A DMABUF over the host pages of a range of GPU memory; fd is -1, with the reason, on failure.
struct DmaBuf {
  explicit DmaBuf(const Memory& memory) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t address = reinterpret_cast<uint64_t>(memory.base);
    const uint64_t start = address & ~(page - 1), end = (address + memory.bytes + page - 1) & ~(page - 1);
    offset = address - start;
    try {
      cuda::driver();
      cuda::PrimaryContext context(memory.device);
      fd = cuda::export_dmabuf(start, end - start, &why);
    } catch (const CudaError& e) {
      why = e.what();
    }
  }
  ~DmaBuf() {
    if (fd >= 0) close(fd); // the registration keeps its own reference
  }
  DmaBuf(const DmaBuf&) = delete;

  int fd = -1;
  uint64_t offset = 0; // of the memory inside the file
  std::string why;
};

} // namespace

Fid<fid_mr> Rail::register_memory(const Memory& memory) {
  iovec iov = {memory.base, memory.bytes};
  fi_mr_attr attr = {};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = FI_SEND | FI_RECV;
  if (info_->caps & FI_RMA) attr.access |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  attr.requested_key = new_key();
  if (memory.kind == Memory::cuda) {
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = memory.device;
  }

  fid_mr* mr = nullptr;
  std::string tried;
  int rc = -FI_ENOSYS;
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
  if (memory.kind == Memory::cuda && FI_VERSION_GE(library_.api, FI_VERSION(1, 20))) {
    const DmaBuf file(memory);
    if (file.fd >= 0) {
      fi_mr_dmabuf dmabuf = {};
      dmabuf.fd = file.fd;
      dmabuf.offset = file.offset;
      dmabuf.len = memory.bytes;
      dmabuf.base_addr = static_cast<char*>(memory.base) - file.offset;
      attr.dmabuf = &dmabuf;
      rc = fi_mr_regattr(domain_.get(), &attr, FI_MR_DMABUF, &mr);
      if (rc) tried = "as DMABUF: " + library_.error(rc) + "; ";
      attr.mr_iov = &iov;
    } else {
      tried = "as DMABUF: " + file.why + "; ";
    }
  }
#endif
  if (rc) rc = fi_mr_regattr(domain_.get(), &attr, 0, &mr); // host memory, or GPU memory by the peer-memory module
  if (rc)
    throw FabricError(concat(
        "registering ", memory.bytes, " bytes of ",
        memory.kind == Memory::cuda ? "GPU memory failed on " : "host memory failed on ", where(), ": ", tried,
        library_.error(rc),
        memory.kind == Memory::cuda ? ". Load the nvidia_peermem module or use a libfabric and driver with DMABUF."
                                    : ". Raise the locked-memory limit (ulimit -l).",
        rc == -FI_EINVAL || rc == -FI_ENOMEM
            ? " Devices bound the size and the number of regions, too: try a smaller heap (TSN_HEAP_SIZE)."
            : ""));
  Fid<fid_mr> owned(mr);
  if (mr_endpoint_) {
    check(fi_mr_bind(mr, &ep_->fid, 0), "fi_mr_bind");
    check(fi_mr_enable(mr), "fi_mr_enable");
  }
  if (fi_mr_key(mr) == FI_KEY_NOTAVAIL)
    throw FabricError("the memory key of " + where() + " does not fit 64 bits; this package needs one that does");
  return owned;
}

// Off the fast path: messages, receives, failures, and completions of neither writes nor reads.
Post Rail::post_error(ssize_t rc, const char* operation, int peer) {
  error = concat(operation, peer >= 0 ? concat(" to peer ", peer) : "", " over rail ", index_,
                 " was refused: ", library_.error(rc));
  return Post::error;
}

Post Rail::on_post_failed(ssize_t rc, uint32_t slot, const char* operation) {
  const int peer = slots_[slot].peer;
  give(slot);
  return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
}

Post Rail::post_message(bool read, const Target& target, const void* local, void* desc, const Transport::Copy& copy,
                        bool more) {
  uint32_t slot;
  if (!take(free_, slot, kCopy, target.peer, copy.cookie)) return Post::again;
  iovec iov = {const_cast<void*>(local), copy.bytes};
  fi_rma_iov remote = {target.remote, copy.bytes, target.key};
  fi_msg_rma message = {};
  message.msg_iov = &iov;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = target.address;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = context(slot);
  message.data = copy.imm;
  const uint64_t flags = FI_COMPLETION | (more ? FI_MORE : 0);
  if (read) return post_result(fi_readmsg(ep_.get(), &message, flags), slot, "a read");
  const uint64_t delivery = copy.source_only ? 0 : op_flags_, immediate = copy.has_imm ? FI_REMOTE_CQ_DATA : 0;
  return post_result(fi_writemsg(ep_.get(), &message, flags | delivery | immediate), slot, "a write");
}

// Sends by copy, without a slot; the next poll reports the completion, which the provider does not.
Post Rail::inject(int peer, fi_addr_t address, const void* data, size_t bytes, uint64_t cookie, const char* operation) {
  const ssize_t rc = fi_inject(ep_.get(), data, bytes, address);
  if (rc == 0) {
    if (cookie != kSilent) ready_.push_back(Event{Event::done, peer, index_, 0, cookie, nullptr, 0, 0, nullptr});
    return Post::ok;
  }
  return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
}

Post Rail::message(int peer, fi_addr_t address, const void* data, uint32_t bytes, uint64_t cookie) {
  const Header header = {self_, kMagic, tokens_[peer]};
  const size_t total = bytes + sizeof header;
  if (total <= inject_ && total <= 256 && names_injected_) {
    char small[256];
    std::memcpy(small, &header, sizeof header);
    std::memcpy(small + sizeof header, data, bytes);
    return inject(peer, address, small, total, cookie, "a message");
  }
  uint32_t slot;
  if (!take(free_, slot, kMessage, peer, cookie)) return Post::again;
  char* copy = buffer(slot);
  std::memcpy(copy, &header, sizeof header);
  std::memcpy(copy + sizeof header, data, bytes);
  iovec iov = {copy, total};
  void* desc = buffers_desc_;
  fi_msg message = {};
  message.msg_iov = &iov;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = address;
  message.context = context(slot);
  // Not the endpoint's delivery-complete: the layer above acknowledges messages if it needs that.
  return post_result(fi_sendmsg(ep_.get(), &message, FI_COMPLETION), slot, "a message");
}

Post Rail::send(int peer, fi_addr_t address, const void* source, void* desc, uint64_t bytes, uint64_t cookie,
                bool on_host) {
  if (bytes <= inject_ && on_host) return inject(peer, address, source, bytes, cookie, "a send");
  uint32_t slot;
  if (!take(free_, slot, kCopy, peer, cookie)) return Post::again;
  return post_result(fi_send(ep_.get(), source, bytes, desc, address, context(slot)), slot, "a send");
}

Post Rail::receive(void* destination, void* desc, uint64_t bytes, uint64_t cookie) {
  uint32_t slot;
  if (!take(free_receives_, slot, kReceive, -1, cookie)) return Post::again;
  return post_result(fi_recv(ep_.get(), destination, bytes, desc, FI_ADDR_UNSPEC, context(slot)), slot, "a receive");
}

void Rail::post_buffers() {
  while (!repost_.empty()) {
    const uint32_t slot = repost_.back();
    const ssize_t rc =
        fi_recv(ep_.get(), buffer(slot), max_message_ + sizeof(Header), buffers_desc_, FI_ADDR_UNSPEC, context(slot));
    if (rc == -FI_EAGAIN) return;
    repost_.pop_back();
    if (rc == 0) {
      slots_[slot] = Slot{kSilent, -1, kBuffer};
      continue;
    }
    error = concat("posting a receive over rail ", index_, " failed: ", library_.error(rc));
    Event event;
    fail(event, -1, kSilent, static_cast<int>(-rc), error);
    ready_.push_back(event);
  }
}

void Rail::fail(Event& event, int peer, uint64_t cookie, int code, const std::string& text) {
  texts_.push_back(text);
  needs_repost_ = true;
  event = Event{Event::failed, peer, index_, 0, cookie, nullptr, 0, code, texts_.back().c_str()};
}

// The completions that completions() leaves: immediates, messages, receives, and those without a slot.
bool Rail::other_completion(const fi_cq_data_entry& entry, Event& event) {
  const uint32_t slot = slot_of(entry.op_context);
  // Some providers repeat the flag in the completion of the write itself, and efa of libfabric 1.17 marks an arriving
  // immediate with FI_WRITE: the two differ in whether an operation of ours belongs to them.
  const bool sent = slot < depth_ && slots_[slot].kind != kFree;
  if ((entry.flags & FI_REMOTE_CQ_DATA) && !(entry.flags & FI_RECV) && !sent) {
    // With FI_RX_CQ_DATA, an immediate uses up one of the posted receives.
    if (imm_consumes_ && slot < slots_.size()) {
      if (slots_[slot].kind == kBuffer) recycle(slot);
      else if (slots_[slot].kind == kReceive) give(slot);
    }
    event = Event{Event::immediate, -1, index_, static_cast<uint32_t>(entry.data), kSilent, nullptr, 0, 0, nullptr};
    return true;
  }
  if (slot >= slots_.size() || slots_[slot].kind == kFree) {
    if (!entry.op_context) return false; // an injected message of a provider that reports those
    fail(event, -1, kSilent, FI_EOTHER, concat("rail ", index_, " completed an operation never posted"));
    return true;
  }
  const Slot done = slots_[slot];
  switch (done.kind) {
  case kReceive:
    give(slot);
    event = Event{Event::done, -1, index_, 0, done.cookie, nullptr, entry.len, 0, nullptr};
    return done.cookie != kSilent;
  case kBuffer: {
    recycle(slot); // reposted at the next poll, so the payload lives until then
    Header header;
    std::memcpy(&header, buffer(slot), sizeof header);
    const bool known = entry.len >= sizeof header && header.magic == kMagic && header.token == token_ &&
                       static_cast<uint32_t>(header.sender) < known_.size() && known_[header.sender];
    if (!known) {
      ++rejected_messages_;
      return false;
    }
    event = Event{
        Event::message, header.sender, index_, 0, kSilent, buffer(slot) + sizeof header, entry.len - sizeof header, 0,
        nullptr};
    return true;
  }
  default:
    give(slot);
    event = Event{Event::done, done.peer, index_, 0, done.cookie, nullptr, 0, 0, nullptr};
    return done.cookie != kSilent;
  }
}

// Takes one error from the completion queue.
bool Rail::read_cq_error(Event& event) {
  // Newer libraries write a longer entry than older headers declare.
  union {
    fi_cq_err_entry entry;
    char room[256];
  } u = {};
  if (fi_cq_readerr(cq_.get(), &u.entry, 0) != 1) return false;
  const uint32_t slot = slot_of(u.entry.op_context);
  int peer = -1;
  uint64_t cookie = kSilent;
  const char* what = "an operation";
  if (slot < slots_.size() && slots_[slot].kind != kFree) {
    const Slot failed = slots_[slot];
    peer = failed.peer;
    cookie = failed.cookie;
    what = failed.kind == kCopy ? "a transfer" : failed.kind == kMessage ? "a message" : "a receive";
    if (failed.kind == kBuffer) recycle(slot);
    else give(slot);
  }
  char detail[128] = "";
  const char* provider_text = fi_cq_strerror(cq_.get(), u.entry.prov_errno, u.entry.err_data, detail, sizeof detail);
  // EFA gives everything of ours its context: the others are the provider's own packets, and packets of a lost peer's
  // message. Their peer is unknown; operations that wait for that peer fail separately.
  if (peer < 0 && is_efa() && pool_) return note_internal_failure(u.entry.err, provider_text), false;
  std::string text = concat(what, peer >= 0 ? concat(" to peer ", peer) : "", " over rail ", index_,
                            " failed: ", library_.error(-static_cast<int64_t>(u.entry.err)));
  if (provider_text && *provider_text) text += std::string(", ") + provider_text;
  // Some providers return a general error, with the system's own beside it.
  const bool hidden = (u.entry.err == FI_EIO || u.entry.err == FI_EOTHER) && is_peer_lost(std::abs(u.entry.prov_errno));
  fail(event, peer, cookie, hidden ? std::abs(u.entry.prov_errno) : u.entry.err, text);
  return true;
}

void Rail::note_internal_failure(int code, const char* reason) {
  ++internal_failures_;
  internal_failure_ = concat("rail ", index_, ": ", library_.error(-static_cast<int64_t>(code)),
                             reason && *reason ? std::string(", ") + reason : "");
}

uint64_t Rail::internal_failures(std::string* last) {
  // Newer libraries write a longer entry than older headers declare.
  union {
    fi_eq_err_entry entry;
    char room[256];
  } u = {};
  while (eq_ && fi_eq_readerr(eq_.get(), &u.entry, 0) > 0) {
    char detail[128] = "";
    note_internal_failure(u.entry.err,
                          fi_eq_strerror(eq_.get(), u.entry.prov_errno, u.entry.err_data, detail, sizeof detail));
    u = {};
  }
  if (internal_failures_) *last = internal_failure_;
  return internal_failures_;
}

// The completion queue could not be read, or holds an error. False if there is nothing to report after all.
bool Rail::on_cq_error(ssize_t code, Event& event) {
  if (code == -FI_EAVAIL) return read_cq_error(event);
  fail(event, -1, kSilent, static_cast<int>(-code),
       concat("reading completions of rail ", index_, " failed: ", library_.error(code)));
  return true;
}

void Rail::repost_buffers() {
  if (ready_.empty()) texts_.clear(); // events in `ready_`, not handed out yet, use their texts
  post_buffers();
  needs_repost_ = !repost_.empty() || !texts_.empty();
}

int Rail::take_ready(Event* events, int capacity) {
  const int n = std::min(capacity, static_cast<int>(ready_.size()));
  std::copy(ready_.begin(), ready_.begin() + n, events);
  ready_.erase(ready_.begin(), ready_.begin() + n);
  return n;
}

} // namespace tsn::fabric
