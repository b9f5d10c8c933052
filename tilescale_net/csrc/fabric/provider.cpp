
#include "tilescale_net/csrc/fabric/provider.h"
#include "tilescale_net/csrc/fabric/transport.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace tsn::fabric {
namespace {

template <typename F>
bool find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  return function != nullptr;
}

std::string version_text(const Library& lib) {
  // "fi_version" has major and minor only; the string that libfabric prints has the patch level too.
  const char* text = lib.tostr(&lib, FI_TYPE_VERSION); // ignores its argument, but needs one
  if (text && *text) return text;
  return concat(FI_MAJOR(lib.version), ".", FI_MINOR(lib.version));
}

// Returns "" and fills `lib`, or the reason why the file is unusable.
std::string open_library(const std::string& file, Library& lib) {
  // Debian's libfabric links PSM, whose constructors would replace the process's handlers of SIGSEGV and others.
  setenv("IPATH_NO_BACKTRACE", "1", 0);
  setenv("HFI_NO_BACKTRACE", "1", 0);
  // As Rail::set_endpoint_options() sets on each endpoint, for libraries that read only the variable.
  setenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV", "0", 0);
  // Endpoints of efa would reach others of their host through objects in /dev/shm, which a killed process leaves there;
  // ranks of a host reach each other without the fabric.
  setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", 0);
  // rxm clears 4,096 buffers of 16 KiB for each endpoint; the package's messages are smaller.
  setenv("FI_OFI_RXM_BUFFER_SIZE", "1024", 0);
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return dlerror();
  uint32_t (*version)() = nullptr;
  if (!find(handle, "fi_version", version) || !find(handle, "fi_getinfo", lib.getinfo) ||
      !find(handle, "fi_freeinfo", lib.freeinfo) || !find(handle, "fi_dupinfo", lib.dupinfo) ||
      !find(handle, "fi_fabric", lib.fabric) || !find(handle, "fi_strerror", lib.strerror) ||
      !find(handle, "fi_tostr", lib.tostr)) {
    dlclose(handle);
    return file + ": is not libfabric (fi_getinfo and its kin are missing)";
  }
  lib.version = version();
  const uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
  lib.api = FI_VERSION_LT(lib.version, headers) ? lib.version : headers;
  lib.version_text = version_text(lib);
  Dl_info where;
  lib.path = dladdr(reinterpret_cast<void*>(lib.getinfo), &where) && where.dli_fname ? where.dli_fname : file;
  return "";
}

} // namespace

std::string Library::error(int64_t rc) const {
  const int code = static_cast<int>(rc < 0 ? -rc : rc);
  return concat(strerror(code), " (", rc, ")", code == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
}

const Library& load_library(const std::string& explicit_file, const std::string& fallback) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Library>> opened; // by the requested file
  std::lock_guard<std::mutex> lock(mutex);

  const char* env = std::getenv("TSN_LIBFABRIC");
  std::vector<std::string> places;
  if (!explicit_file.empty()) places = {explicit_file};
  else if (env && *env) places = {env};
  else {
    places = {"/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1", "libfabric.so.1"};
    if (!fallback.empty()) places.push_back(fallback);
  }

  std::string tried;
  for (const std::string& file : places) {
    auto it = opened.find(file);
    if (it != opened.end()) return *it->second;
    auto lib = std::make_unique<Library>();
    std::string why = open_library(file, *lib);
    if (why.empty()) return *(opened[file] = std::move(lib));
    tried += "\n  " + why;
  }
  throw FabricError("libfabric could not be loaded; tried:" + tried +
                    "\nInstall it (Debian and Ubuntu: apt-get install libfabric1; any machine: pip install mpich; EFA: "
                    "AWS's EFA installer) or name its file in TSN_LIBFABRIC.");
}

namespace {
constexpr const char* kFolder = "/dev/shm";
constexpr const char* kScheme = "fi_shm://"; // followed by the object's name
constexpr const char* kBeginning = "tilescale_net-";

// Names of this process: a lock does not exclude its own process, and opening and closing the file would end it.
std::mutex mine_in_use;
std::set<std::string>& mine() {
  static auto* names = new std::set<std::string>;
  return *names;
}

// Of the whole file. The process owns it, not its forked children.
bool lock(int fd, int command) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, command, &whole) == 0;
}

bool is_linked(int fd) {
  struct stat file;
  return fstat(fd, &file) == 0 && file.st_nlink > 0;
}

// Calls `each` with the name of every file there of this user.
void for_each_file(const std::function<void(int, const std::string&)>& each) {
  DIR* folder = opendir(kFolder);
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    struct stat file;
    if (std::strncmp(entry->d_name, kBeginning, std::strlen(kBeginning)) == 0 &&
        fstatat(dirfd(folder), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 && file.st_uid == geteuid())
      each(dirfd(folder), entry->d_name);
  }
  closedir(folder);
}

// Objects first: if this process is killed here, the file leads to the rest of them.
void remove_all(const std::string& name) {
  for_each_file([&](int folder, const std::string& file) {
    if (file.compare(0, name.size() + 1, name + ":") == 0) unlinkat(folder, file.c_str(), 0);
  });
  unlink((kFolder + ("/" + name)).c_str());
}

void remove_all_of_ended_processes() {
  for_each_file([&](int folder, const std::string& file) {
    if (file.find(':') != std::string::npos || mine().count(file)) return;
    const int fd = openat(folder, file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (lock(fd, F_SETLK) && is_linked(fd)) remove_all(file);
    close(fd);
  });
}

} // namespace

SharedMemoryName::SharedMemoryName() {
  std::lock_guard<std::mutex> guard(mine_in_use);
  remove_all_of_ended_processes();
  while (lock_ < 0) {
    uint64_t secret = random_secret(); // as letters: numbers in such names are process ids
    name_ = kBeginning + (concat(getpid(), "-"));
    for (int i = 0; i < 16; ++i, secret >>= 4) name_ += static_cast<char>('a' + (secret & 15));
    lock_ = open((kFolder + ("/" + name_)).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (lock_ < 0 || !lock(lock_, F_SETLKW)) {
      const std::string why = strerror(errno);
      if (lock_ >= 0) close(lock_);
      throw FabricError("provider 'shm' needs a file in /dev/shm that can be locked, " + name_ + ": " + why);
    }
    if (is_linked(lock_)) break;
    close(lock_); // another process found it before it was locked
    lock_ = -1;
  }
  mine().insert(name_);
}

SharedMemoryName::~SharedMemoryName() {
  remove();
  std::lock_guard<std::mutex> guard(mine_in_use);
  close(lock_);
  mine().erase(name_);
}

void SharedMemoryName::give(fi_info* info) const {
  const std::string address = kScheme + name_;
  free(info->src_addr);
  info->src_addr = strdup(address.c_str());
  info->src_addrlen = address.size() + 1;
}

void SharedMemoryName::remove() {
  std::lock_guard<std::mutex> guard(mine_in_use);
  remove_all(name_);
  remove_all_of_ended_processes();
}

std::string no_room_for_shared_memory() {
  constexpr uint64_t kRegion = 17000000; // bytes, of the endpoint that the provider reckons with, 1.17 to 2.5
  struct statvfs room;
  if (statvfs("/dev/shm", &room)) return "; there is no /dev/shm, which it needs";
  const uint64_t free = (uint64_t)room.f_bsize * room.f_bavail, processors = (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
  if (free >= kRegion * processors) return "";
  return concat("; libfabric offers it only while /dev/shm has room for an endpoint on each of the host's ", processors,
                " processors, ", kRegion * processors / 1000000, " MB, and now ", free / 1000000,
                " MB are free: make it larger (docker run --shm-size=…), or end what fills it");
}

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

// Supported features, in libfabric's terms. Rail honours every mode and mr_mode bit set here.
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
  return is_hardware(info) ? 2 : INT_MAX; // other hardware before tcp; anything else only by name
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

// Keeps the offers of one list that match the caller's provider and interface.
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
    // Software providers may advertise FI_HMEM without any CUDA inside; only a NIC really reaches GPU memory.
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
