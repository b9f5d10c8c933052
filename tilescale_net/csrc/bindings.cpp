// The module tilescale_net._native: each folder of csrc adds its part.
#include <pybind11/pybind11.h>

namespace tsn {
namespace fabric {
void bind(pybind11::module_& m);
} // namespace fabric
namespace proxy {
void bind(pybind11::module_& m);
} // namespace proxy
namespace launch {
void bind(pybind11::module_& m);
} // namespace launch
} // namespace tsn

PYBIND11_MODULE(_native, m) {
  m.doc() = "Queue consumer, proxy, fabric transports and launches of tilescale_net.";
  tsn::fabric::bind(m);
  tsn::proxy::bind(m);
  tsn::launch::bind(m);
}
