// The module tilescale_net._native: each folder of csrc adds its part.
#include <pybind11/pybind11.h>

namespace tsn {
void bind_fabric(pybind11::module_& m);
void bind_proxy(pybind11::module_& m);
void bind_bench(pybind11::module_& m);
} // namespace tsn

PYBIND11_MODULE(_native, m) {
  m.doc() = "Queue consumer, proxy, fabric transports and fabric benchmarks of tilescale_net.";
  tsn::bind_fabric(m);
  tsn::bind_proxy(m);
  tsn::bind_bench(m);
}
