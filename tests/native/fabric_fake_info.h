// What fabric_fake.cpp reports of its NICs.
#pragma once

#include "fabric_fake.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <typename T>
T* blank() {
  return static_cast<T*>(calloc(1, sizeof(T)));
}

fi_info* blank_info() {
  auto* info = blank<fi_info>();
  info->tx_attr = blank<fi_tx_attr>();
  info->rx_attr = blank<fi_rx_attr>();
  info->ep_attr = blank<fi_ep_attr>();
  info->domain_attr = blank<fi_domain_attr>();
  info->fabric_attr = blank<fi_fabric_attr>();
  return info;
}

fi_info* make_info(int nic, const fi_info* hints) {
  fi_info* info = blank_info();
  info->caps = hints->caps;
  const EfaAnswers& a = answers();
  info->mode = a.mode;
  info->addr_format = FI_ADDR_EFA;
  info->tx_attr->size = tx_size();
  info->rx_attr->size = rx_size();
  info->tx_attr->inject_size = a.inject_size;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->max_msg_size = a.max_msg_size;
  info->domain_attr->name = strdup(("rdmap" + std::to_string(nic) + "s0").c_str());
  info->domain_attr->mr_mode = a.mr_mode | FI_MR_LOCAL | (option("mr_endpoint", 0) ? FI_MR_ENDPOINT : 0);
  info->domain_attr->data_progress = a.progress_auto ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
  info->domain_attr->cq_data_size = option("imm_bytes", (long)a.cq_data_size);
  info->domain_attr->mr_key_size = a.mr_key_size;
  info->domain_attr->mr_iov_limit = a.mr_iov_limit;
  info->domain_attr->mr_cnt = (size_t)option("mr_count", 0);
  info->fabric_attr->prov_name = strdup("efa");
  info->fabric_attr->name = strdup(a.fabric);
  info->nic = blank<fid_nic>();
  info->nic->bus_attr = blank<fi_bus_attr>();
  info->nic->bus_attr->bus_type = FI_BUS_PCI;
  info->nic->bus_attr->attr.pci.device_id = static_cast<uint8_t>(nic);
  info->nic->link_attr = blank<fi_link_attr>();
  info->nic->link_attr->speed = a.link_speed;
  return info;
}

} // namespace

EXPORT void fi_freeinfo(struct fi_info* info) {
  for (fi_info* next; info; info = next) {
    next = info->next;
    if (info->nic) {
      free(info->nic->bus_attr);
      free(info->nic->link_attr);
    }
    for (void* part : {(void*)info->domain_attr->name, (void*)info->fabric_attr->name,
                       (void*)info->fabric_attr->prov_name, (void*)info->nic, (void*)info->tx_attr,
                       (void*)info->rx_attr, (void*)info->ep_attr, (void*)info->domain_attr, (void*)info->fabric_attr})
      free(part);
    free(info);
  }
}

EXPORT struct fi_info* fi_dupinfo(const struct fi_info* info) {
  fi_info* copy = blank_info();
  if (!info) return copy;
  const fi_info parts = *copy;
  *copy = *info;
  copy->next = nullptr;
  *(copy->tx_attr = parts.tx_attr) = *info->tx_attr;
  *(copy->rx_attr = parts.rx_attr) = *info->rx_attr;
  *(copy->ep_attr = parts.ep_attr) = *info->ep_attr;
  *(copy->domain_attr = parts.domain_attr) = *info->domain_attr;
  *(copy->fabric_attr = parts.fabric_attr) = *info->fabric_attr;
  const auto text = [](const char* from) { return from ? strdup(from) : nullptr; };
  copy->domain_attr->name = text(info->domain_attr->name);
  copy->fabric_attr->name = text(info->fabric_attr->name);
  copy->fabric_attr->prov_name = text(info->fabric_attr->prov_name);
  if (info->nic) {
    *(copy->nic = blank<fid_nic>()) = *info->nic;
    *(copy->nic->bus_attr = blank<fi_bus_attr>()) = *info->nic->bus_attr;
    *(copy->nic->link_attr = blank<fi_link_attr>()) = *info->nic->link_attr;
  }
  return copy;
}
