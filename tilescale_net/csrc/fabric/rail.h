// One rail: one endpoint with its domain, address vector and completion queue, on one NIC.
//
// Every outstanding operation holds a slot, which records the operation, so that completions need no search and
// errors are reported in the caller's terms. The number of slots bounds this side's outstanding operations;
// immediates come unrequested, and the completion queue has room for TransportOptions::immediates of them, which
// their senders must not exceed. One thread at a time uses a rail.
#pragma once

#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/provider.h"
#include "tilescale_net/csrc/fabric/transport.h"

#include <arpa/inet.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <sys/mman.h>
#include <unistd.h>

// The data path of a rail is inlined into its transport's: at ten million operations a second a call is one percent.
#define TSN_HOT [[gnu::always_inline]] inline

namespace tsn::fabric {

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
  size_t open(const Library& library, fi_info* info, fi_cq_attr cq_attr, size_t least, Check check) {
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
      // Without one, the provider ends the process when a packet of its own fails, such as one to a peer that has
      // ended.
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

  // Closed in the reverse order.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> av_;
  Fid<fid_cq> cq_;
  Fid<fid_eq> eq_; // of efa alone
  Fid<fid_ep> ep_;
};

class Rail : Endpoint {
public:
  // `index` is the rail's number in its transport. Throws FabricError.
  Rail(const Library& library, fi_info* info, const TransportOptions& options, int index, bool device_memory)
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
  ~Rail() { close(); }
  Rail(const Rail&) = delete;

  // --- set-up ------------------------------------------------------------------------------------------------------
  // the endpoint's address, opaque
  std::string name() const {
    size_t bytes = 0;
    fi_getname(&ep_->fid, nullptr, &bytes); // answers -FI_ETOOSMALL and the size
    std::string name(std::max<size_t>(bytes, 1), '\0');
    check(fi_getname(&ep_->fid, &name[0], &bytes), "fi_getname");
    name.resize(bytes);
    return name;
  }
  fi_addr_t insert(const std::string& name) {
    fi_addr_t address = FI_ADDR_UNSPEC;
    const int n = fi_av_insert(av_.get(), name.data(), 1, &address, 0, nullptr);
    if (n != 1)
      throw FabricError("fi_av_insert failed on " + where() + ": " +
                        (n < 0 ? library_.error(n) : std::string("the address was not accepted")));
    return address;
  }
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
  Fid<fid_mr> register_memory(const Memory& memory) {
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
  TSN_HOT Post write(const Target& to, const void* source, void* desc, const Transport::Copy& copy) {
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
  TSN_HOT Post read(const Target& from, void* destination, void* desc, const Transport::Copy& copy) {
    if (copy.more && free_.given - free_.taken > 1) return post_message(true, from, destination, desc, copy, true);
    uint32_t slot;
    if (!take(free_, slot, kCopy, from.peer, copy.cookie)) return Post::again;
    return post_result(
        fi_read(ep_.get(), destination, copy.bytes, desc, from.address, from.remote, from.key, context(slot)), slot,
        "a read");
  }
  Post message(int peer, fi_addr_t address, const void* data, uint32_t bytes, uint64_t cookie) {
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
  Post send(int peer, fi_addr_t address, const void* source, void* desc, uint64_t bytes, uint64_t cookie,
            bool on_host) {
    if (bytes <= inject_ && on_host) return inject(peer, address, source, bytes, cookie, "a send");
    uint32_t slot;
    if (!take(free_, slot, kCopy, peer, cookie)) return Post::again;
    return post_result(fi_send(ep_.get(), source, bytes, desc, address, context(slot)), slot, "a send");
  }
  Post receive(void* destination, void* desc, uint64_t bytes, uint64_t cookie) {
    uint32_t slot;
    if (!take(free_receives_, slot, kReceive, -1, cookie)) return Post::again;
    return post_result(fi_recv(ep_.get(), destination, bytes, desc, FI_ADDR_UNSPEC, context(slot)), slot, "a receive");
  }
  TSN_HOT int poll(Event* events, int capacity) {
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
  uint64_t internal_failures(std::string* last) {
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
  // invalidates the last poll's payloads
  TSN_HOT void new_poll() {
    if (__builtin_expect(needs_repost_, 0)) repost_buffers();
  }

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

  std::string where() const {
    return "provider '" + provider_name(info_) + "', interface '" + std::string(info_->domain_attr->name) + "'";
  }
  void close() {
    // Registrations bound to an endpoint must go before it; others may still be in use until it is gone.
    if (mr_endpoint_) buffers_mr_.reset();
    ep_.reset();
    buffers_mr_.reset();
  }
  // set-up calls answer 0 or a negative code
  void check(int rc, const char* call) const {
    if (rc) throw FabricError(std::string(call) + " failed on " + where() + ": " + library_.error(rc));
  }
  void open(const TransportOptions& options) {
    fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    // Immediates arrive unrequested: room for them beyond this side's outstanding operations, unless they take
    // receives.
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
  void set_endpoint_options() {
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
  void remove_shared_memory() const {
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
  void allocate_slots() {
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
  void post_buffers() {
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
  // A process with a key can write to the memory: if we choose the key and it is wide enough, it is unpredictable.
  uint64_t new_key() {
    static std::atomic<uint64_t> next{1};
    if (prov_key_) return 0;
    return wide_keys_ ? random_secret() >> 1 : next++; // some providers keep the highest bit for themselves
  }

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
    void reset(uint32_t capacity) {
      uint32_t size = 1;
      while (size < capacity) size *= 2;
      ring.reset(new uint32_t[size]);
      mask = size - 1;
    }
    bool empty() const { return taken == given; }
    uint32_t take() { return ring[taken++ & mask]; }
    void give(uint32_t slot) { ring[given++ & mask] = slot; }
  };
  TSN_HOT bool take(FreeSlots& free, uint32_t& slot, Kind kind, int peer, uint64_t cookie) {
    if (__builtin_expect(free.empty(), 0)) return false;
    slot = free.take();
    slots_[slot] = Slot{cookie, peer, kind};
    return true;
  }
  TSN_HOT void give(uint32_t slot) {
    slots_[slot].kind = kFree;
    (slot < depth_ ? free_ : free_receives_).give(slot);
  }
  // Sends by copy, without a slot; the next poll reports the completion, which the provider does not.
  Post inject(int peer, fi_addr_t address, const void* data, size_t bytes, uint64_t cookie, const char* operation) {
    const ssize_t rc = fi_inject(ep_.get(), data, bytes, address);
    if (rc == 0) {
      if (cookie != kSilent) ready_.push_back(Event{Event::done, peer, index_, 0, cookie, nullptr, 0, 0, nullptr});
      return Post::ok;
    }
    return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
  }
  // Off the fast path: messages, receives, failures, and completions of neither writes nor reads.
  [[gnu::cold]] Post post_error(ssize_t rc, const char* operation, int peer) {
    error = concat(operation, peer >= 0 ? concat(" to peer ", peer) : "", " over rail ", index_,
                   " was refused: ", library_.error(rc));
    return Post::error;
  }
  TSN_HOT Post post_result(ssize_t rc, uint32_t slot, const char* operation) {
    return __builtin_expect(rc == 0, 1) ? Post::ok : on_post_failed(rc, slot, operation);
  }
  [[gnu::noinline]] Post on_post_failed(ssize_t rc, uint32_t slot, const char* operation) {
    const int peer = slots_[slot].peer;
    give(slot);
    return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
  }
  // A write or a read with flags of its own.
  [[gnu::noinline]] Post post_message(bool read, const Target& target, const void* local, void* desc,
                                      const Transport::Copy& copy, bool more) {
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
  // Turns completions into events; returns the number of those for the caller. The loop keeps its variables in
  // registers: the compiler must assume that an event could lie anywhere.
  TSN_HOT int completions(const fi_cq_data_entry* entries, int count, Event* events) {
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
  // The completions that completions() leaves: immediates, messages, receives, and those without a slot.
  [[gnu::noinline]] bool other_completion(const fi_cq_data_entry& entry, Event& event) {
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
  // The completion queue could not be read, or holds an error. False if there is nothing to report after all.
  [[gnu::cold]] bool on_cq_error(ssize_t code, Event& event) {
    if (code == -FI_EAVAIL) return read_cq_error(event);
    fail(event, -1, kSilent, static_cast<int>(-code),
         concat("reading completions of rail ", index_, " failed: ", library_.error(code)));
    return true;
  }
  [[gnu::cold]] void note_internal_failure(int code, const char* reason) {
    ++internal_failures_;
    internal_failure_ = concat("rail ", index_, ": ", library_.error(-static_cast<int64_t>(code)),
                               reason && *reason ? std::string(", ") + reason : "");
  }
  // Takes one error from the completion queue.
  [[gnu::cold]] bool read_cq_error(Event& event) {
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
    const bool hidden =
        (u.entry.err == FI_EIO || u.entry.err == FI_EOTHER) && is_peer_lost(std::abs(u.entry.prov_errno));
    fail(event, peer, cookie, hidden ? std::abs(u.entry.prov_errno) : u.entry.err, text);
    return true;
  }
  [[gnu::noinline]] void repost_buffers() {
    if (ready_.empty()) texts_.clear(); // events in `ready_`, not handed out yet, use their texts
    post_buffers();
    needs_repost_ = !repost_.empty() || !texts_.empty();
  }
  [[gnu::noinline]] int take_ready(Event* events, int capacity) {
    const int n = std::min(capacity, static_cast<int>(ready_.size()));
    std::copy(ready_.begin(), ready_.begin() + n, events);
    ready_.erase(ready_.begin(), ready_.begin() + n);
    return n;
  }
  void recycle(uint32_t slot) {
    repost_.push_back(slot);
    needs_repost_ = true;
  }
  [[gnu::cold]] void fail(Event& event, int peer, uint64_t cookie, int code, const std::string& text) {
    texts_.push_back(text);
    needs_repost_ = true;
    event = Event{Event::failed, peer, index_, 0, cookie, nullptr, 0, code, texts_.back().c_str()};
  }

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
