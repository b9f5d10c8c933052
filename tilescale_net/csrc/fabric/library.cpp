#include "library.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include <dlfcn.h>

#include "transport.h"

namespace tsn::fabric {
namespace {

template <typename F>
bool find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  return function != nullptr;
}

std::string version_text(const Library& lib) {
  // "fi_version" has major and minor only; the string that libfabric prints has the patch level too.
  const char* text = lib.tostr(&lib, FI_TYPE_VERSION); // reads nothing of its argument, but needs one
  if (text && *text) return text;
  return std::to_string(FI_MAJOR(lib.version)) + "." + std::to_string(FI_MINOR(lib.version));
}

// Returns "" and fills `lib`, or why the file does not serve.
std::string open_library(const std::string& file, Library& lib) {
  // Debian's libfabric links PSM, whose constructors replace the process's handlers of SIGSEGV and its like otherwise.
  setenv("IPATH_NO_BACKTRACE", "1", 0);
  setenv("HFI_NO_BACKTRACE", "1", 0);
  // What Rail::set_endpoint_options() sets on each endpoint, for libraries that read the variable only.
  setenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV", "0", 0);
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
  return std::string(strerror(static_cast<int>(rc < 0 ? -rc : rc))) + " (" + std::to_string(rc) + ")";
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

} // namespace tsn::fabric
