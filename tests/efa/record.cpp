// record LIBFABRIC DEVICE: prints what libfabric's efa provider answers to requests like the package's, as rows of
// tests/native/efa_answers.h; record.sh runs it over the stand-in. DEVICE as in EFA_STANDIN.
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

// As in csrc/fabric/rail.h.
constexpr int kEfa = -(0xefa << 16), kRnrRetry = kEfa, kEmulatedWrite = kEfa + 2, kUnsolicitedWriteReceives = kEfa + 8;
constexpr int kCudaApiPermitted = 10, kMaxMsgSize = 12, kMaxRmaSize = 14, kInjectMsgSize = 16;
constexpr size_t kCompletions = 4864;

void* library;
template <typename F>
F* find(const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}
// libfabric's exported functions; its others are inline.
#define LIBFABRIC(name) find<decltype(name)>(#name)

fi_info* ask(bool delivery_complete, bool hmem, const char* fabric, uint64_t mode) {
  fi_info* hints = LIBFABRIC(fi_dupinfo)(nullptr);
  hints->caps = FI_MSG | FI_SEND | FI_RECV | FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  if (hmem) hints->caps |= FI_HMEM;
  hints->mode = mode;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL | FI_MR_ENDPOINT;
  if (hmem) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  if (delivery_complete) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  hints->fabric_attr->prov_name = strdup("efa");
  const uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
  fi_info* list = nullptr;
  LIBFABRIC(fi_getinfo)(FI_VERSION_LT(LIBFABRIC(fi_version)(), headers) ? LIBFABRIC(fi_version)() : headers, nullptr,
                        nullptr, 0, hints, &list);
  LIBFABRIC(fi_freeinfo)(hints);
  for (fi_info* i = list; i; i = i->next) {
    if (i->ep_attr->type != FI_EP_RDM) continue;
    if ((std::string(fabric) == "efa-direct") == (strcmp(i->fabric_attr->name, "efa-direct") == 0)) return i;
  }
  return nullptr;
}

void check(int code, const char* what) {
  if (!code) return;
  fprintf(stderr, "%s: %s\n", what, LIBFABRIC(fi_strerror)(-code));
  exit(1);
}

void row(const char* device, const char* fabric) {
  constexpr uint64_t kModes = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  fi_info* info = ask(true, false, fabric, kModes);
  const bool grants = info;
  if (!info) info = ask(false, false, fabric, kModes);
  if (!info) return;
  // FI_RX_CQ_DATA, where it is offered, is a choice: without it immediates take no receives.
  const bool wants_receives = ask(grants, false, fabric, FI_CONTEXT | FI_CONTEXT2) == nullptr;
  fid_fabric* f = nullptr;
  fid_domain* d = nullptr;
  fid_av* av = nullptr;
  fid_cq* cq = nullptr;
  fid_ep* ep = nullptr;
  check(LIBFABRIC(fi_fabric)(info->fabric_attr, &f, nullptr), "fi_fabric");
  check(fi_domain(f, info, &d, nullptr), "fi_domain");
  fi_av_attr av_attr = {};
  av_attr.type = FI_AV_TABLE;
  check(fi_av_open(d, &av_attr, &av, nullptr), "fi_av_open");
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.size = kCompletions;
  check(fi_cq_open(d, &cq_attr, &cq, nullptr), "fi_cq_open");
  check(fi_endpoint(d, info, &ep, nullptr), "fi_endpoint");
  check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
  check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  const auto set = [&](int name, const auto& value) {
    return fi_setopt(&ep->fid, FI_OPT_ENDPOINT, name, &value, sizeof value);
  };
  const auto get = [&](int name, auto fallback) {
    size_t bytes = sizeof fallback;
    fi_getopt(&ep->fid, FI_OPT_ENDPOINT, name, &fallback, &bytes);
    return fallback;
  };
  const int unsolicited = set(kUnsolicitedWriteReceives, false), cuda = set(kCudaApiPermitted, false);
  const int rnr = set(kRnrRetry, size_t{7});
  const bool emulated = get(kEmulatedWrite, true);
  const size_t messages = get(kMaxMsgSize, size_t{0}), transfers = get(kMaxRmaSize, size_t{0}),
               inject = get(kInjectMsgSize, size_t{0});
  check(fi_enable(ep), "fi_enable");
  printf("    {\"%u.%u\", \"%s\", \"%s\", %d, %d, 0x%" PRIx64 ", 0x%x, %zu, %zu, %zu, 0x%zxu, %zu, %zu, %zu, %d, %d,\n"
         "     %zu, 0x%zxu, 0x%zxu, %zu, %d, %d, %d, %d},\n",
         FI_MAJOR(LIBFABRIC(fi_version)()), FI_MINOR(LIBFABRIC(fi_version)()), device, fabric, grants, wants_receives,
         info->mode, unsigned(info->domain_attr->mr_mode), info->tx_attr->size, info->rx_attr->size,
         info->tx_attr->inject_size, info->ep_attr->max_msg_size, info->domain_attr->cq_data_size,
         info->domain_attr->mr_key_size, info->domain_attr->mr_iov_limit,
         info->domain_attr->data_progress == FI_PROGRESS_AUTO, (info->tx_attr->msg_order & FI_ORDER_SAS) != 0,
         info->nic && info->nic->link_attr ? info->nic->link_attr->speed : size_t{0}, messages, transfers, inject,
         emulated, unsolicited, cuda, rnr);
  fi_close(&ep->fid);
  fi_close(&cq->fid);
  fi_close(&av->fid);
  fi_close(&d->fid);
  fi_close(&f->fid);
}

} // namespace

int main(int, char** argv) {
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  for (const char* fabric : {"efa", "efa-direct"}) row(argv[2], fabric);
}
