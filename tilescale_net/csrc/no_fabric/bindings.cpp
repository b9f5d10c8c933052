// Stands for everything that needs libfabric's headers in a build without them: each call raises ConfigurationError.
#include <pybind11/pybind11.h>

#include <stdexcept>

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

std::unique_ptr<Transport> make_transport(const TransportOptions&) { throw MissingFabric(); }

void bind_libfabric(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const MissingFabric& e) {
      py::object type = py::module_::import("tilescale_net.errors").attr("ConfigurationError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  for (const char* name : {"fabric_library", "fabric_offers", "nearest_devices", "SharingBench"})
    m.def(name, [](const py::args&, const py::kwargs&) -> py::object { throw MissingFabric(); });
}

} // namespace tsn::fabric
