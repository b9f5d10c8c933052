// Choice of provider, interface and NICs, from libfabric's offers and the caller's request.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"
#include <rdma/fabric.h>
#include <sys/random.h>

namespace tsn::fabric {

// An unpredictable number, from the kernel's generator. Throws std::runtime_error on an error, which Linux does not
// return.
inline uint64_t random_secret() {
  uint64_t value;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value)
    if (errno != EINTR) throw std::runtime_error("getrandom failed");
  return value;
}

// libfabric opened at run time: its few exported functions, found with dlsym. The data path needs none of them:
// libfabric's inline functions go through tables in its objects.
//
// Searched in this order: the caller's choice or TSN_LIBFABRIC; /opt/amazon/efa (AWS's own, with EFA and CUDA); the
// system; the caller's fallback, which Python sets to the library inside the `mpich` wheel.
struct Library {
  std::string path;         // the file that was opened
  std::string version_text; // e.g. "2.5.1"
  uint32_t version = 0;     // its own API version
  uint32_t api = 0;         // the requested one: the lower of its own and the headers'

  int (*getinfo)(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*freeinfo)(fi_info*) = nullptr;
  fi_info* (*dupinfo)(const fi_info*) = nullptr;
  int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*strerror)(int) = nullptr;
  char* (*tostr)(const void*, fi_type) = nullptr;

  // libfabric's words for a negative return code, with the number: "Connection refused (-111)".
  std::string error(int64_t rc) const;
};

// Opened once per file and never closed: providers may leave threads behind. Throws FabricError naming every place
// that was tried.
const Library& load_library(const std::string& explicit_file, const std::string& fallback);

// Objects in /dev/shm through which libfabric's shm provider reaches the processes of a host. A killed process leaves
// them behind. A process number does not tell whether it lives, because numbers differ between PID namespaces: it
// holds a lock, which ends with it. Objects of other programs are left alone.
// A unique name for the endpoints of a transport; and a file of that name in /dev/shm, locked as long as this object,
// or the process, lives. The objects of its endpoints have longer names that begin with it.
class SharedMemoryName {
public:
  SharedMemoryName(); // removes leftovers of this user's ended processes; throws FabricError
  ~SharedMemoryName();
  SharedMemoryName(const SharedMemoryName&) = delete;
  void operator=(const SharedMemoryName&) = delete;

  // Endpoints made from `info` have the name.
  void give(fi_info* info) const;

  // Removes the objects and the file, even with open endpoints; and leftovers of ended processes.
  void remove();

private:
  std::string name_;
  int lock_ = -1;
};

// Text for a provider missing for lack of room; empty if there seems to be enough.
std::string no_room_for_shared_memory();

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

// The best offer for `options`, or FabricError naming the request, the offers, and the remedy. `threading`: the
// caller's promise; by default FI_THREAD_DOMAIN, one thread per rail.
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
// Among equally near candidates it starts at number `first`, so that processes spread over them.
std::vector<int> nearest_devices(const std::vector<std::string>& candidates, const std::string& device, int limit,
                                 int first);

} // namespace tsn::fabric
