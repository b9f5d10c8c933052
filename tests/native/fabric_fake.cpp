// A libfabric whose only provider behaves like an EFA device, strictly: built as libfabric.so.1 and named in
// TSN_LIBFABRIC, it connects endpoints within one process. It delivers in random order, keeps small queues, wants real
// memory behind every operation, descriptors of the right memory, known initiators, receives for immediates and rung
// doorbells; broken rules are recorded in fake_violations(). With the driver of fake_cuda.cpp, data written to
// a GPU's memory are seen there after a flush.
//
// Attributes, limits and what options return are the answers of the real provider in efa_answers.h. FAKE_FABRIC
// configures it: "nics=4,name=efa-direct,device=p5,library=2.5,tx=16,rx=64,mr_endpoint=1,cuda_calls=0,dmabuf=1,
// unsolicited=1,mr_bytes=0,mr_count=0,cq=0,manual=0,revoke=0,abort=0,seed=1". tx, rx: shorter queues. NIC n sits at PCI
// device 0000:00:0n.0; cuda_calls=1: cannot do without the CUDA API; mr_bytes, mr_count, cq: largest region, number of
// regions and entries of a completion queue, 0 for any; unsolicited=1: immediates take no receives unless that is
// switched off, 2: it cannot be; manual=1: nothing arrives while its target does not poll; revoke=1: what uses memory
// that is closed fails, as after the failure of a job, and is no violation; abort=1: ends the process at the first
// violation.
#include "fabric_fake_info.h"

namespace {

Endpoint* ep_of(fid_ep* e) { return static_cast<Endpoint*>(e); }

fi_ops_rma rma = {};
fi_ops_msg msg = {};
fi_ops_ep ep_ops = {};
fi_ops_cm cm = {};
fi_ops_cq cq_ops = {};
fi_ops_eq eq_ops = {};
fi_ops_av av_ops = {};
fi_ops_mr mr_ops = {};
fi_ops_domain domain_ops = {};
fi_ops_fabric fabric_ops = {};
fi_ops ops = {}; // one table for all kinds of objects

int close_object(fid* f) {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  switch (f->fclass) {
  case FI_CLASS_EP: {
    auto* e = static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(f));
    for (Mr* mr : regions)
      if (mr->endpoint == e) violate("an endpoint closed before the memory bound to it");
    endpoints.erase(std::find(endpoints.begin(), endpoints.end(), e));
    wire.erase(std::remove_if(wire.begin(), wire.end(), [&](Packet& p) { return p.from == e; }), wire.end());
    for (Packet& p : wire)
      if (p.to == e) p.to = nullptr;
    auto& list = e->cq->endpoints;
    list.erase(std::find(list.begin(), list.end(), e));
    e->domain->objects--;
    delete e;
    break;
  }
  case FI_CLASS_MR: {
    auto* mr = static_cast<Mr*>(reinterpret_cast<fid_mr*>(f));
    for (Packet& p : wire) {
      if (p.kind == Packet::inject || p.local < mr->base || p.local >= mr->base + mr->bytes) continue;
      if (!option("revoke", 0)) violate("a region was closed while an operation used it");
      p.revoked = true;
    }
    regions.erase(std::find(regions.begin(), regions.end(), mr));
    if (mr->late) // it is never seen
      late_writes.erase(std::remove_if(late_writes.begin(), late_writes.end(),
                                       [&](const Late& w) { return w.to >= mr->base && w.to < mr->base + mr->bytes; }),
                        late_writes.end());
    mr->domain->objects--;
    delete mr;
    break;
  }
  case FI_CLASS_CQ: {
    auto* cq = static_cast<Cq*>(reinterpret_cast<fid_cq*>(f));
    if (!cq->endpoints.empty()) violate("a completion queue was closed before its endpoint");
    cq->domain->objects--;
    delete cq;
    break;
  }
  case FI_CLASS_AV: {
    auto* av = static_cast<Av*>(reinterpret_cast<fid_av*>(f));
    for (Endpoint* e : endpoints)
      if (e->av == av) violate("an address vector was closed before its endpoint");
    av->domain->objects--;
    delete av;
    break;
  }
  case FI_CLASS_DOMAIN: {
    auto* domain = static_cast<Domain*>(reinterpret_cast<fid_domain*>(f));
    if (domain->objects) violate("a domain was closed before what it holds");
    delete domain;
    break;
  }
  default:
    free(f);
  }
  return 0;
}

int bind(fid* f, fid* other, uint64_t flags) {
  if (f->fclass == FI_CLASS_MR) {
    static_cast<Mr*>(reinterpret_cast<fid_mr*>(f))->endpoint = static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(other));
    return 0;
  }
  auto* e = static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(f));
  if (e->enabled) violate("something was bound to an endpoint that is enabled");
  if (other->fclass == FI_CLASS_EQ) {
    e->has_eq = true;
  } else if (other->fclass == FI_CLASS_CQ) {
    if ((flags & (FI_TRANSMIT | FI_RECV)) != (FI_TRANSMIT | FI_RECV)) violate("a queue for one direction alone");
    e->cq = static_cast<Cq*>(reinterpret_cast<fid_cq*>(other));
    e->cq->endpoints.push_back(e);
  } else {
    e->av = static_cast<Av*>(reinterpret_cast<fid_av*>(other));
  }
  return 0;
}

int control(fid* f, int, void*) {
  if (f->fclass == FI_CLASS_EP) {
    auto* e = static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(f));
    if (!e->has_eq) violate("no event queue: the provider would end the process where a packet of its own fails");
    if (!e->cq || !e->av) return -(e->cq ? FI_ENOAV : FI_ENOCQ);
    if (e->enabled) violate("an endpoint was enabled twice");
    e->enabled = true;
  }
  if (f->fclass == FI_CLASS_MR) static_cast<Mr*>(reinterpret_cast<fid_mr*>(f))->enabled = true;
  return 0;
}

int register_attr(fid* f, const fi_mr_attr* attr, uint64_t flags, fid_mr** out) {
  (void)flags;
  auto* domain = static_cast<Domain*>(reinterpret_cast<fid_domain*>(f));
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  if (attr->iov_count != 1) violate("a region of several pieces; mr_iov_limit is 1");
  if (option("mr_count", 0) && regions.size() >= (size_t)option("mr_count", 0)) return -FI_ENOMEM;
  if (option("mr_bytes", 0) && attr->mr_iov->iov_len > (size_t)option("mr_bytes", 0)) return -FI_EINVAL;
  auto* mr = new Mr{};
  mr->base = static_cast<char*>(attr->mr_iov->iov_base);
  mr->bytes = attr->mr_iov->iov_len;
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
  if (flags & FI_MR_DMABUF) {
    if (!option("dmabuf", 1)) return delete mr, -FI_EOPNOTSUPP;
    if (attr->iface != FI_HMEM_CUDA || attr->dmabuf->fd < 0) violate("a bad DMABUF registration");
    mr->base = static_cast<char*>(attr->dmabuf->base_addr) + attr->dmabuf->offset;
    mr->bytes = attr->dmabuf->len;
    notes.insert("dmabuf");
  } else
#endif
      if (attr->iface == FI_HMEM_CUDA) {
    if (option("peermem", 1) == 0) return delete mr, -FI_ENOSYS;
    notes.insert("peermem");
  }
  mr->fid.fclass = FI_CLASS_MR;
  mr->fid.ops = &ops;
  mr->mem_desc = mr;
  mr->key = next_key++;
  mr->access = attr->access;
  mr->enabled = !option("mr_endpoint", 0);
  mr->domain = domain;
  mr->late = attr->iface == FI_HMEM_CUDA && writes_are_late();
  domain->objects++;
  regions.push_back(mr);
  *out = mr;
  return 0;
}

ssize_t cq_read(fid_cq* c, void* out, size_t count) {
  auto* cq = static_cast<Cq*>(c);
  const Entered entered(cq->domain);
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  cq->domain->thread = pthread_self();
  progress(cq);
  if (!cq->errors.empty()) return -FI_EAVAIL;
  auto& all = cq->entries; // injected messages are not reported
  all.erase(std::remove_if(all.begin(), all.end(), [](const fi_cq_data_entry& e) { return !e.flags; }), all.end());
  const size_t n = std::min(count, cq->entries.size());
  if (!n) return -FI_EAGAIN;
  std::copy(cq->entries.begin(), cq->entries.begin() + n, static_cast<fi_cq_data_entry*>(out));
  cq->entries.erase(cq->entries.begin(), cq->entries.begin() + n);
  return static_cast<ssize_t>(n);
}

template <typename T>
T* make(size_t fclass) {
  T* object = static_cast<T*>(calloc(1, sizeof(T)));
  object->fid.fclass = fclass;
  object->fid.ops = &ops;
  return object;
}

void fill_rma() {
  rma.write = [](fid_ep* e, const void* p, size_t n, void* d, fi_addr_t to, uint64_t at, uint64_t key, void* context) {
    return post(ep_of(e), {Packet::write, nullptr, nullptr, (const char*)p, n, at, key, 0, false, true, context, ""},
                to, d, false);
  };
  rma.writedata = [](fid_ep* e, const void* p, size_t n, void* d, uint64_t data, fi_addr_t to, uint64_t at,
                     uint64_t key, void* context) {
    return post(ep_of(e), {Packet::write, nullptr, nullptr, (const char*)p, n, at, key, data, true, true, context, ""},
                to, d, false);
  };
  rma.read = [](fid_ep* e, void* p, size_t n, void* d, fi_addr_t to, uint64_t at, uint64_t key, void* context) {
    return post(ep_of(e), {Packet::read, nullptr, nullptr, (const char*)p, n, at, key, 0, false, true, context, ""}, to,
                d, false);
  };
  rma.writemsg = [](fid_ep* e, const fi_msg_rma* m, uint64_t flags) {
    return post(ep_of(e),
                {Packet::write, nullptr, nullptr, (const char*)m->msg_iov->iov_base, m->msg_iov->iov_len,
                 m->rma_iov->addr, m->rma_iov->key, m->data, (flags & FI_REMOTE_CQ_DATA) != 0, true, m->context, ""},
                m->addr, m->desc[0], more(flags, m->iov_count * m->rma_iov_count));
  };
  rma.readmsg = [](fid_ep* e, const fi_msg_rma* m, uint64_t flags) {
    return post(ep_of(e),
                {Packet::read, nullptr, nullptr, (const char*)m->msg_iov->iov_base, m->msg_iov->iov_len,
                 m->rma_iov->addr, m->rma_iov->key, 0, false, true, m->context, ""},
                m->addr, m->desc[0], more(flags, m->iov_count * m->rma_iov_count));
  };
}

void fill_messages() {
  msg.send = [](fid_ep* e, const void* p, size_t n, void* d, fi_addr_t to, void* context) {
    return post(ep_of(e), {Packet::message, nullptr, nullptr, (const char*)p, n, 0, 0, 0, false, true, context, ""}, to,
                d, false);
  };
  msg.sendmsg = [](fid_ep* e, const fi_msg* m, uint64_t flags) {
    return post(ep_of(e),
                {Packet::message, nullptr, nullptr, (const char*)m->msg_iov->iov_base, m->msg_iov->iov_len, 0, 0, 0,
                 false, true, m->context, ""},
                m->addr, m->desc[0], more(flags, m->iov_count));
  };
  msg.inject = [](fid_ep* e, const void* p, size_t n, fi_addr_t to) {
    return post(ep_of(e), {Packet::inject, nullptr, nullptr, (const char*)p, n, 0, 0, 0, false, true, nullptr, ""}, to,
                nullptr, false);
  };
  msg.recv = [](fid_ep* e, void* p, size_t n, void* d, fi_addr_t, void* context) -> ssize_t {
    const Entered entered(ep_of(e)->domain);
    std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
    if (ep_of(e)->receives.size() >= rx_size()) return -FI_EAGAIN;
    check_local(p, n, d, FI_RECV, "a receive's memory");
    if (!context) violate("no memory behind a receive");
    ep_of(e)->receives.push_back({p, context, n});
    return 0;
  };
}

void fill_endpoint() {
  // Names by their numbers, since old headers have them not.
  constexpr int kEfa = -(0xefa << 16), kRnrRetry = kEfa, kEmulatedWrite = kEfa + 2,
                kUnsolicitedWriteReceives = kEfa + 8;
  constexpr int kCudaApiPermitted = 10, kMaxMsgSize = 12, kMaxRmaSize = 14, kInjectMsgSize = 16;
  ep_ops.setopt = [](fid_t f, int, int name, const void* value, size_t bytes) -> int {
    auto* e = static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(f));
    if (e->enabled) violate("an option was set after its endpoint was enabled");
    const bool flag = *static_cast<const char*>(value);
    if (name == kUnsolicitedWriteReceives && option("unsolicited", 1) != 2) {
      if (answers().unsolicited_off == 0) e->unsolicited = flag;
      return answers().unsolicited_off;
    }
    if (name == kCudaApiPermitted && !flag) { // recorded where there is no CUDA: -FI_EINVAL of "efa"
      notes.insert("cuda_forbidden");
      return option("cuda_calls", 0) ? -FI_EOPNOTSUPP : 0;
    }
    if (name == kRnrRetry) {
      if (bytes != sizeof(size_t)) return -FI_EINVAL;
      e->retries_forever = *static_cast<const size_t*>(value) == 7;
      return answers().rnr_retry_7;
    }
    return -FI_ENOPROTOOPT;
  };
  ep_ops.getopt = [](fid_t, int, int name, void* value, size_t*) -> int {
    const EfaAnswers& a = answers();
    if (name == kEmulatedWrite) return *static_cast<bool*>(value) = a.emulated_write, 0;
    if (name == kMaxMsgSize) return *static_cast<size_t*>(value) = a.max_message, 0;
    if (name == kMaxRmaSize) return *static_cast<size_t*>(value) = a.max_rma, 0;
    if (name == kInjectMsgSize) return *static_cast<size_t*>(value) = a.inject_message, 0;
    return -FI_ENOPROTOOPT;
  };
  cm.getname = [](fid_t f, void* to, size_t* bytes) -> int {
    const size_t room = *bytes;
    *bytes = 32;
    if (room < 32) return -FI_ETOOSMALL;
    memset(to, 0, 32);
    memcpy(to, &static_cast<Endpoint*>(reinterpret_cast<fid_ep*>(f))->address, 8);
    return 0;
  };
}

void fill_queues() {
  cq_ops.read = cq_read;
  cq_ops.readerr = [](fid_cq* c, fi_cq_err_entry* out, uint64_t) -> ssize_t {
    auto* cq = static_cast<Cq*>(c);
    if (cq->errors.empty()) return -FI_EAGAIN;
    *out = cq->errors.front();
    cq->errors.pop_front();
    return 1;
  };
  cq_ops.strerror = [](fid_cq*, int, const void*, char*, size_t) { return "a fake device's reason"; };
  av_ops.insert = [](fid_av* a, const void* names, size_t, fi_addr_t* out, uint64_t, void*) -> int {
    uint64_t address;
    memcpy(&address, names, 8);
    auto& list = static_cast<Av*>(a)->addresses;
    list.push_back(address);
    *out = list.size() - 1;
    return 1;
  };
}

void fill_domain() {
  mr_ops.regattr = register_attr;
  mr_ops.reg = nullptr;
  domain_ops.av_open = [](fid_domain* d, fi_av_attr*, fid_av** out, void*) -> int {
    auto* av = new Av{};
    av->domain = static_cast<Domain*>(d);
    av->domain->objects++;
    av->fid = {FI_CLASS_AV, nullptr, &ops};
    av->ops = &av_ops;
    *out = av;
    return 0;
  };
  domain_ops.cq_open = [](fid_domain* d, fi_cq_attr* attr, fid_cq** out, void*) -> int {
    if (option("cq", 0) && attr->size > (size_t)option("cq", 0)) return -FI_EINVAL;
    auto* cq = new Cq{};
    cq->domain = static_cast<Domain*>(d);
    cq->domain->objects++;
    cq->fid = {FI_CLASS_CQ, nullptr, &ops};
    cq->ops = &cq_ops;
    cq->size = attr->size;
    if (attr->format != FI_CQ_FORMAT_DATA) violate("an unexpected format of completions");
    *out = cq;
    return 0;
  };
  domain_ops.endpoint = [](fid_domain* d, fi_info* info, fid_ep** out, void*) -> int {
    std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
    auto* e = new Endpoint{};
    e->domain = static_cast<Domain*>(d);
    e->domain->objects++;
    e->fid = {FI_CLASS_EP, nullptr, &ops};
    e->ops = &ep_ops;
    e->cm = &cm;
    e->msg = &msg;
    e->rma = &rma;
    e->address = next_address++;
    e->tx = info->tx_attr->size;
    endpoints.push_back(e);
    *out = e;
    return 0;
  };
  eq_ops.readerr = [](fid_eq*, fi_eq_err_entry*, uint64_t) -> ssize_t { return -FI_EAGAIN; };
  fabric_ops.eq_open = [](fid_fabric*, fi_eq_attr*, fid_eq** out, void*) -> int {
    *out = make<fid_eq>(FI_CLASS_EQ);
    (*out)->ops = &eq_ops;
    return 0;
  };
  fabric_ops.domain = [](fid_fabric*, fi_info*, fid_domain** out, void*) -> int {
    auto* domain = new Domain{};
    domain->fid = {FI_CLASS_DOMAIN, nullptr, &ops};
    domain->ops = &domain_ops;
    domain->mr = &mr_ops;
    *out = domain;
    return 0;
  };
}

void fill_tables() {
  ops.close = close_object;
  ops.bind = bind;
  ops.control = control;
  fill_rma();
  fill_messages();
  fill_endpoint();
  fill_queues();
  fill_domain();
}

} // namespace

EXPORT uint32_t fi_version(void) { return FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION); }
EXPORT const char* fi_strerror(int error) { return strerror(error); }
EXPORT char* fi_tostr(const void*, enum fi_type) { return const_cast<char*>("99.0-fake"); }
EXPORT const char* fake_violations(void) { return violations.c_str(); }
EXPORT void fake_reset(void) {
  violations.clear();
  notes.clear();
  refusals = unrung = 0;
  random_bits().seed(static_cast<uint64_t>(option("seed", 1)));
}
EXPORT size_t fake_refusals(void) { return refusals; }
EXPORT size_t fake_unrung(void) { return unrung; }
EXPORT int fake_noted(const char* note) { return static_cast<int>(notes.count(note)); }

EXPORT int fi_getinfo(uint32_t, const char*, const char*, uint64_t, const struct fi_info* hints, struct fi_info** out) {
  fill_tables();
  if (hints->fabric_attr->prov_name && strcmp(hints->fabric_attr->prov_name, "efa")) return -FI_ENODATA;
  if ((hints->caps & FI_HMEM) && !option("hmem", 1)) return -FI_ENODATA;
  // Features that it lacks, and modes that the caller must support.
  if (hints->caps & (FI_RMA_EVENT | FI_FENCE | FI_TRIGGER | (direct() ? FI_ATOMIC : 0))) return -FI_ENODATA;
  const uint64_t order = hints->tx_attr->msg_order | hints->rx_attr->msg_order;
  if (order & ~(direct() ? 0 : FI_ORDER_SAS)) return -FI_ENODATA;
  const uint64_t needed = answers().mode;
  const uint64_t registration = (uint64_t)answers().mr_mode | FI_MR_LOCAL | (hints->caps & FI_HMEM ? FI_MR_HMEM : 0) |
                                (option("mr_endpoint", 0) ? FI_MR_ENDPOINT : 0);
  if (~hints->mode & needed || ~(uint64_t)hints->domain_attr->mr_mode & registration) return -FI_ENODATA;
  if (hints->tx_attr->op_flags & FI_DELIVERY_COMPLETE && !answers().grants_delivery_complete) return -FI_ENODATA;
  fi_info** last = out;
  for (int nic = 1; nic <= option("nics", 1); nic++) {
    *last = make_info(nic, hints);
    (*last)->tx_attr->op_flags = hints->tx_attr->op_flags;
    last = &(*last)->next;
  }
  return 0;
}

EXPORT int fi_fabric(struct fi_fabric_attr*, struct fid_fabric** out, void*) {
  *out = make<fid_fabric>(FI_CLASS_FABRIC);
  (*out)->ops = &fabric_ops;
  return 0;
}
