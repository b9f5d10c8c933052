// Python bindings that need libfabric's headers; ../no_fabric has their counterpart, for builds without them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "provider.h"

namespace py = pybind11;

namespace tsn::fabric {

void bind_libfabric(py::module_& m) {
  m.def(
      "fabric_library",
      [](const std::string& library, const std::string& fallback) {
        const Library& lib = load_library(library, fallback);
        py::dict d;
        d["path"] = lib.path;
        d["version"] = lib.version_text;
        d["api"] = concat(FI_MAJOR(lib.api), ".", FI_MINOR(lib.api));
        d["headers"] = concat(FI_MAJOR_VERSION, ".", FI_MINOR_VERSION);
        return d;
      },
      py::arg("library") = "", py::arg("fallback") = "",
      "The libfabric in use: path, version, the API version asked of it and that of the headers compiled against.");
  m.def(
      "fabric_offers",
      [](const std::string& library, const std::string& fallback) {
        py::list list;
        for (const Offer& o : list_offers(load_library(library, fallback)))
          list.append(dict_of(
              TSN_NAMED(o.provider, o.domain, o.address, o.loopback, o.hardware, o.immediates, o.device_memory)));
        return list;
      },
      py::arg("library") = "", py::arg("fallback") = "",
      "One dict per provider and interface that libfabric offers for one-sided traffic.");
  m.def("nearest_devices", &nearest_devices, py::arg("candidates"), py::arg("device"), py::arg("limit"),
        py::arg("first") = 0, "Indices of the PCI paths in `candidates` nearest to `device`; see fabric/provider.h.");
}

} // namespace tsn::fabric
