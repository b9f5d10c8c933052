// Which provider, which interface, which NICs: from what libfabric offers and what the caller requested.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "library.h"
#include "shared_memory_objects.h"
#include "transport.h"

namespace tsn::fabric {

// Owns a list of fi_info, or one of them.
struct InfoDeleter {
  const Library* library;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoDeleter>;

struct Selection {
  std::vector<InfoPtr> rails;     // one fi_info per rail
  bool device_memory = false;     // the provider can register GPU memory
  bool delivery_complete = false; // FI_DELIVERY_COMPLETE is offered (and set in tx_attr->op_flags)
  // Of the endpoints of provider shm.
  std::unique_ptr<SharedMemoryName> shared_memory;
};

// The best offer for `options`, or FabricError naming what was wanted, what was offered, and what to change.
// `threading` is what the caller keeps to; by default FI_THREAD_DOMAIN, one thread per rail.
Selection select_provider(const Library& library, const TransportOptions& options,
                          fi_threading threading = FI_THREAD_DOMAIN);

// "efa-direct" is a fabric of the provider "efa"; all others go by libfabric's own name.
std::string provider_name(const fi_info* info);
bool is_loopback(const fi_info* info);

// One line per interface that every provider offers for one-sided traffic; for `python -m tilescale_net.info` and
// errors.
struct Offer {
  std::string provider, domain, address;
  bool loopback, hardware, immediates, device_memory;
};
std::vector<Offer> list_offers(const Library& library);

// Indices of the candidates nearest to `device`, at most `limit` of them, each position given as the path of its PCI
// device in sysfs ("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"): the nearest share the longest path with it.
// Candidates at equal distance are taken from number `first` on, so that several processes do not all take the same.
std::vector<int> nearest_devices(const std::vector<std::string>& candidates, const std::string& device, int limit,
                                 int first);

} // namespace tsn::fabric
