// libfabric opened at run time: its few exported functions, found with dlsym. The data path needs none of them, because
// libfabric's inline functions go through tables in its objects.
//
// Searched in this order: the caller's choice or TSN_LIBFABRIC; /opt/amazon/efa (AWS's own, with EFA and CUDA); the
// system; the caller's fallback, which Python sets to the library inside the `mpich` wheel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <rdma/fabric.h>

namespace tsn::fabric {

struct Library {
  std::string path;         // the file that was opened
  std::string version_text; // e.g. "2.5.1"
  uint32_t version = 0;     // its own API version
  uint32_t api = 0;         // the one to ask for: the lower of its own and of the headers compiled against

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

} // namespace tsn::fabric
