// Replaces everything that needs libfabric's headers in a build without them: each call raises ConfigurationError.
#include <pybind11/pybind11.h>

#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/fabric/bindings.h"

namespace py = pybind11;

namespace tsn::fabric {
namespace {

class MissingFabric : public std::runtime_error {
public:
  MissingFabric()
      : std::runtime_error("the native part was built without libfabric's headers, so nothing can cross nodes or use a "
                           "provider; install the headers (Debian, Ubuntu: apt-get install libfabric-dev) or name "
                           "their folder in TSN_LIBFABRIC_INCLUDE, then build again (launch.sh does so by itself)") {}
};

} // namespace

std::unique_ptr<Transport> make_libfabric(const TransportOptions&) { throw MissingFabric(); }

void bind_libfabric(py::module_& m) {
  translate<MissingFabric>("ConfigurationError");
  for (const char* name : {"fabric_library", "fabric_offers", "nearest_devices"})
    m.def(name, [](const py::args&, const py::kwargs&) -> py::object { throw MissingFabric(); });
}

} // namespace tsn::fabric

namespace tsn::bench {

// Of the benchmarks' module.
void bind_sharing(py::module_& m) {
  translate<fabric::MissingFabric>("ConfigurationError");
  m.def("SharingBench", [](const py::args&, const py::kwargs&) -> py::object { throw fabric::MissingFabric(); });
}

} // namespace tsn::bench
