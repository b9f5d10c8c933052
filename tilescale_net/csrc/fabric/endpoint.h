// An endpoint of libfabric with what it stands on: fabric, domain, address vector and completion queue.
#pragma once

#include <algorithm>
#include <memory>

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "library.h"

namespace tsn::fabric {

template <typename T>
struct FidDeleter {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using Fid = std::unique_ptr<T, FidDeleter<T>>;

class Endpoint {
protected:
  // Opens and binds all of it; the caller sets options and enables it. `check` is called with what each call returns
  // and its name, and throws where that is not 0. Returns the size of the completion queue: what `cq_attr` requests, or
  // less where the device has no longer ones, but not below `least`.
  template <typename Check>
  size_t open(const Library& library, fi_info* info, fi_cq_attr cq_attr, size_t least, Check check);

  // Closed in the reverse order.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> av_;
  Fid<fid_cq> cq_;
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
  check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind (address vector)");
  check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind (completion queue)");
  return cq_attr.size;
}

} // namespace tsn::fabric
