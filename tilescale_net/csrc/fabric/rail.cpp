// Set-up of a rail; its data path is in rail_data.cpp.
#include "rail.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <rdma/fi_ext.h>

#include "provider.h"

namespace tsn::fabric {
namespace {

// Options of endpoints by their numbers, which are part of the library's interface: what is built with headers older
// than the library that it runs with must set them, too. Their names are FI_OPT_EFA_RNR_RETRY, …_EMULATED_WRITE,
// …_USE_UNSOLICITED_WRITE_RECV, FI_OPT_CUDA_API_PERMITTED, …_MAX_MSG_SIZE, …_MAX_RMA_SIZE and …_INJECT_MSG_SIZE.
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
  receives_ = limit(pool_ ? options.message_buffers : options.depth, info->rx_attr->size);
  inject_ = static_cast<uint32_t>(info->tx_attr->inject_size);
  max_send_ = max_rma_ = info->ep_attr->max_msg_size;
  const size_t largest = std::min<size_t>(options.message_bytes + sizeof(Header), info->ep_attr->max_msg_size);
  max_message_ = pool_ ? static_cast<uint32_t>(largest - sizeof(Header)) : 0;
  buffer_bytes_ = (largest + 63) / 64 * 64;

  open(options.immediates);
  allocate_slots();
  check(fi_enable(ep_.get()), "fi_enable");
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

void Rail::open(uint32_t immediates) {
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  // Immediates arrive unasked: room for them beyond what this side can have outstanding.
  const uint32_t ours = depth_ + receives_;
  cq_attr.size = ours + immediates;
  immediates_ = static_cast<uint32_t>(
      Endpoint::open(library_, info_, cq_attr, ours + 1, [this](int rc, const char* call) { check(rc, call); }) - ours);
  set_endpoint_options();
}

// Options that only hardware providers know; older libraries refuse them.
void Rail::set_endpoint_options() {
  const auto set = [&](int name, const auto& value) {
    return fi_setopt(&ep_->fid, FI_OPT_ENDPOINT, name, &value, sizeof value);
  };
  const auto get = [&](int name, auto* value) {
    size_t bytes = sizeof *value;
    return fi_getopt(&ep_->fid, FI_OPT_ENDPOINT, name, value, &bytes) == 0;
  };
  const bool efa = std::string(info_->fabric_attr->prov_name) == "efa";
  // A write's immediate shall take a posted receive, so that a queue that no thread empties stops the sender.
  if (efa && imm_consumes_) set(kUnsolicitedWriteReceives, false);
  // A kernel that waits for a put would deadlock with a provider that calls CUDA in its data path: forbid it, and where
  // the provider cannot do without, go through staging instead. An unknown option means an old provider: keep it.
  if (device_memory_) {
    const int rc = set(kCudaApiPermitted, false);
    if (rc == -FI_EOPNOTSUPP || rc == -FI_EINVAL) device_memory_ = false;
  }
  if (!efa) return;
  set(kRnrRetry, size_t{7}); // SRD retries "receiver not ready" without end: flow control instead of an error
  bool emulated = false;
  if (get(kEmulatedWrite, &emulated)) emulated_write_ = emulated;
  // Where the limits of messages and of RMA differ, the endpoint's attributes tell the larger one only.
  size_t limit = 0;
  if (get(kMaxMsgSize, &limit) && limit) max_send_ = limit;
  if (get(kMaxRmaSize, &limit) && limit) max_rma_ = limit;
  if (get(kInjectMsgSize, &limit)) inject_ = static_cast<uint32_t>(std::min<size_t>(inject_, limit));
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

  // Providers that keep their own state in the operation's context need real memory behind it.
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

// A process that has a key can write to the memory: where we choose the key and it has room, it cannot be guessed.
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

} // namespace tsn::fabric
