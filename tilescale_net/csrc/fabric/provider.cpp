#include "provider.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <set>
#include <tuple>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

namespace tsn::fabric {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size() && !text.empty();) {
    size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

struct Want {
  std::string provider;
  bool one_sided, multi_host, device_memory, delivery_complete;
  fi_threading threading = FI_THREAD_DOMAIN;
};

// What we can work with, in libfabric's terms. Every mode and mr_mode bit set here is one that Rail honours.
InfoPtr make_hints(const Library& library, const Want& want) {
  InfoPtr hints(library.dupinfo(nullptr), InfoDeleter{&library});
  if (!hints) throw FabricError("libfabric: out of memory for hints");
  hints->caps = FI_MSG | FI_SEND | FI_RECV;
  if (want.one_sided) hints->caps |= FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  if (want.device_memory) hints->caps |= FI_HMEM;
  if (want.multi_host) hints->caps |= FI_REMOTE_COMM;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL | FI_MR_ENDPOINT;
  if (want.device_memory) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  hints->domain_attr->threading = want.threading;
  // We poll anyway, at both ends: no provider needs a progress thread of its own.
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  if (want.delivery_complete) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  if (!want.provider.empty()) {
    const std::string name = want.provider == "efa-direct" ? "efa" : want.provider;
    hints->fabric_attr->prov_name = strdup(name.c_str()); // freed with the hints
  }
  return hints;
}

InfoPtr query(const Library& library, const Want& want) {
  InfoPtr hints = make_hints(library, want);
  fi_info* list = nullptr;
  int rc = library.getinfo(library.api, nullptr, nullptr, 0, hints.get(), &list);
  if (rc && rc != -FI_ENODATA)
    throw FabricError("fi_getinfo failed: " + library.error(rc) + " (libfabric " + library.version_text + ", " +
                      library.path + ")");
  return InfoPtr(rc ? nullptr : list, InfoDeleter{&library});
}

bool carries_immediates(const fi_info* info) { return info->domain_attr->cq_data_size >= 4; }

bool is_hardware(const fi_info* info) { return info->nic != nullptr; }

bool is_internet(const fi_info* info) {
  return info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6 ||
         info->addr_format == FI_SOCKADDR;
}

// Lower is better. Loopback TCP goes before shared memory because it reports the death of a peer and leaves no files
// behind.
int preference(const fi_info* info) {
  static const char* const order[] = {"efa-direct", "efa", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "shm", "sockets"};
  const std::string name = provider_name(info);
  for (int i = 0; i < static_cast<int>(sizeof order / sizeof *order); ++i)
    if (name == order[i]) return i;
  return is_hardware(info) ? 2 : INT_MAX; // other hardware before tcp; anything else only when it is named
}

std::string address_text(const fi_info* info) {
  char text[INET6_ADDRSTRLEN] = "";
  if (!info->src_addr) return "";
  const auto* any = static_cast<const sockaddr*>(info->src_addr);
  if (info->addr_format == FI_SOCKADDR_IN || (info->addr_format == FI_SOCKADDR && any->sa_family == AF_INET))
    inet_ntop(AF_INET, &static_cast<const sockaddr_in*>(info->src_addr)->sin_addr, text, sizeof text);
  else if (is_internet(info))
    inet_ntop(AF_INET6, &static_cast<const sockaddr_in6*>(info->src_addr)->sin6_addr, text, sizeof text);
  return text;
}

bool is_link_local(const fi_info* info) { return address_text(info).compare(0, 5, "fe80:") == 0; }

bool matches_interface(const fi_info* info, const std::vector<std::string>& names) {
  for (const std::string& name : names)
    if (name == info->domain_attr->name || name == address_text(info)) return true;
  return false;
}

std::string sysfs_path(const std::string& pci) {
  if (pci.empty()) return "";
  char path[PATH_MAX];
  std::string lower = pci;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (lower.size() == 7) lower = "0000:" + lower;                 // without a domain
  if (lower.size() > 12) lower = lower.substr(lower.size() - 12); // CUDA writes eight digits of domain
  return realpath(("/sys/bus/pci/devices/" + lower).c_str(), path) ? path : "";
}

std::string sysfs_path(const fi_info* info) {
  if (!info->nic || !info->nic->bus_attr || info->nic->bus_attr->bus_type != FI_BUS_PCI) return "";
  const auto& pci = info->nic->bus_attr->attr.pci;
  char text[32];
  snprintf(text, sizeof text, "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id);
  return sysfs_path(text);
}

std::string describe(const std::vector<Offer>& offers) {
  std::string text;
  for (const Offer& o : offers) text += "\n  " + o.provider + " on " + o.domain + " " + o.address;
  return text.empty() ? " nothing" : text;
}

[[noreturn]] void refuse(const Library& library, const std::string& what, const std::string& todo) {
  std::string offered;
  std::set<std::string> names;
  for (const Offer& o : list_offers(library)) names.insert(o.provider);
  for (const std::string& name : names) offered += (offered.empty() ? "" : ", ") + name;
  throw FabricError(what + ". libfabric " + library.version_text + " (" + library.path +
                    ") offers one-sided traffic by: " + (offered.empty() ? "nothing" : offered) + ". " + todo);
}

// Keeps the offers of one list that obey the caller's choice of provider and interface.
std::vector<fi_info*> usable(fi_info* list, const TransportOptions& options, const std::string& provider,
                             const std::vector<std::string>& interfaces) {
  std::vector<fi_info*> kept;
  for (fi_info* info = list; info; info = info->next) {
    if (options.one_sided && !carries_immediates(info)) continue;
    if (!provider.empty() && provider_name(info) != provider) continue;
    if (provider.empty() && preference(info) == INT_MAX) continue;
    if (!interfaces.empty()) {
      if (!matches_interface(info, interfaces)) continue;
    } else if (is_internet(info)) {
      if (is_loopback(info) == options.multi_host || is_link_local(info)) continue;
    }
    kept.push_back(info);
  }
  // NICs keep the order of the list, by which rail i finds the peer's rail i.
  auto rank = [&](fi_info* i) {
    const bool elsewhere = !is_hardware(i) && address_text(i) != options.address;
    return std::make_tuple(preference(i), elsewhere, i->addr_format == FI_SOCKADDR_IN6);
  };
  std::stable_sort(kept.begin(), kept.end(), [&](fi_info* a, fi_info* b) { return rank(a) < rank(b); });
  return kept;
}

// Only the best provider's offers stay: one per interface, in order.
std::vector<fi_info*> one_per_interface(const std::vector<fi_info*>& offers) {
  std::vector<fi_info*> kept;
  std::set<std::string> domains;
  for (fi_info* info : offers)
    if (provider_name(info) == provider_name(offers[0]) && domains.insert(info->domain_attr->name).second)
      kept.push_back(info);
  return kept;
}

} // namespace

std::string provider_name(const fi_info* info) {
  const std::string fabric = info->fabric_attr->name ? info->fabric_attr->name : "";
  return fabric == "efa-direct" ? fabric : info->fabric_attr->prov_name;
}

bool is_loopback(const fi_info* info) {
  const std::string address = address_text(info);
  return address.compare(0, 4, "127.") == 0 || address == "::1";
}

std::vector<Offer> list_offers(const Library& library) {
  std::vector<Offer> offers;
  std::set<std::string> seen;
  InfoPtr list = query(library, {"", true, false, false, false, FI_THREAD_DOMAIN});
  for (fi_info* i = list.get(); i; i = i->next) {
    Offer offer{provider_name(i),
                i->domain_attr->name,
                address_text(i),
                is_loopback(i),
                is_hardware(i),
                carries_immediates(i),
                (i->caps & FI_HMEM) && is_hardware(i)};
    if (seen.insert(offer.provider + "|" + offer.domain + "|" + offer.address).second) offers.push_back(offer);
  }
  return offers;
}

std::vector<int> nearest_devices(const std::vector<std::string>& candidates, const std::string& device, int limit,
                                 int first) {
  auto shared = [&](const std::string& path) {
    const auto a = split(path, '/'), b = split(device, '/');
    size_t n = 0;
    while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
    return n;
  };
  size_t best = 0;
  for (const std::string& path : candidates) best = std::max(best, shared(path));
  std::vector<int> nearest;
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i)
    if (shared(candidates[i]) == best) nearest.push_back(i);
  if (nearest.empty()) return nearest;
  std::rotate(nearest.begin(), nearest.begin() + first % nearest.size(), nearest.end());
  if (static_cast<int>(nearest.size()) > limit) nearest.resize(limit);
  std::sort(nearest.begin(), nearest.end()); // rail i talks to the peer's rail i: keep one order everywhere
  return nearest;
}

Selection select_provider(const Library& library, const TransportOptions& options, fi_threading threading) {
  const std::string &provider = options.provider, &interface = options.interface;
  const std::vector<std::string> interfaces = split(interface, ',');

  // From the richest request to the plainest; the first that leaves something usable wins.
  Selection selection;
  InfoPtr list(nullptr, InfoDeleter{&library});
  std::vector<fi_info*> offers;
  for (int wish = 0; wish < 4 && offers.empty(); ++wish) {
    const bool device = !(wish & 2), deliver = !(wish & 1);
    if ((device && !options.device_memory) || (deliver && !options.delivery_complete)) continue;
    list = query(library, {provider, options.one_sided, options.multi_host, device, deliver, threading});
    offers = usable(list.get(), options, provider, interfaces);
    // Software providers may advertise FI_HMEM without any CUDA inside; only a NIC reaches GPU memory by itself.
    if (device)
      offers.erase(std::remove_if(offers.begin(), offers.end(), [](fi_info* i) { return !is_hardware(i); }),
                   offers.end());
    selection.device_memory = device;
    selection.delivery_complete = deliver;
  }
  if (offers.empty()) {
    const std::string kind = options.one_sided ? "one-sided writes with 4-byte immediates" : "messages";
    if (!interfaces.empty())
      refuse(library,
             "no provider" + (provider.empty() ? "" : " '" + provider + "'") + " offers " + kind + " on interface '" +
                 interface + "'",
             "Interfaces:" + describe(list_offers(library)) + "\nSet TSN_FABRIC_INTERFACE to one of them or unset it.");
    if (!provider.empty())
      refuse(library,
             "provider '" + provider + "' is unknown here or does not offer " + kind +
                 (options.multi_host ? " between hosts" : " on this host's loopback") +
                 (provider == "shm" && !options.multi_host ? no_room_for_shared_memory() : ""),
             "Set TSN_PROVIDER to one of these, unset it, or name an interface in TSN_FABRIC_INTERFACE.");
    refuse(library, "no provider offers " + kind + (options.multi_host ? " between hosts" : " on one host"),
           "Load the NIC's driver, or name another libfabric in TSN_LIBFABRIC.");
  }

  offers = one_per_interface(offers);
  std::vector<std::string> paths;
  for (fi_info* info : offers) paths.push_back(sysfs_path(info));
  // Several interfaces of a software provider are no reason to stripe: they share one CPU.
  const bool stripe = is_hardware(offers[0]) || !interfaces.empty();
  const int limit = options.rails > 0 ? options.rails : stripe ? options.max_rails : 1;
  const int first = options.gpu_pci.empty() && interfaces.empty() && stripe ? options.rank : 0;
  const std::vector<int> chosen = nearest_devices(paths, sysfs_path(options.gpu_pci), limit, first);
  const int rails = options.rails > 0 ? options.rails : static_cast<int>(chosen.size());
  for (int r = 0; r < rails; ++r) {
    selection.rails.emplace_back(library.dupinfo(offers[chosen[r % chosen.size()]]), InfoDeleter{&library});
    selection.rails.back()->domain_attr->threading = threading; // less locking than the provider might assume
  }
  if (provider_name(offers[0]) == "shm") {
    selection.shared_memory = std::make_unique<SharedMemoryName>();
    for (const InfoPtr& info : selection.rails) selection.shared_memory->give(info.get());
  }
  return selection;
}

} // namespace tsn::fabric
