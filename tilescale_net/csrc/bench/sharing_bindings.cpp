// Python's view of the benchmark of shared endpoints, which drives libfabric itself.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "sharing.h"
#include "tilescale_net/csrc/fabric/bindings.h"

namespace py = pybind11;
using namespace py::literals;

namespace tsn::bench {
namespace {

py::dict run_sharing(SharingBench& bench, int threads, int window, uint64_t bytes, bool write, bool shared,
                     double duration_s, double timeout_s) {
  SharingOptions o;
  o.threads = threads;
  o.window = window;
  o.bytes = bytes;
  o.write = write;
  o.shared = shared;
  o.duration_s = duration_s;
  o.timeout_s = timeout_s;
  if (threads < 1 || window < 1 || bytes < 1 || bytes > SharingBench::kBufferBytes ||
      (!shared && bench.endpoints() < threads))
    throw py::value_error("threads, window and bytes are 1 or more; exclusive use needs an endpoint for every thread");
  SharingResult result;
  {
    py::gil_scoped_release release;
    result = bench.run(o);
  }
  return py::dict("operations_per_s"_a = result.operations_per_s, "cycles_per_post"_a = result.cycles_per_post);
}

} // namespace

void bind_sharing(py::module_& m) {
  py::class_<SharingBench>(m, "SharingBench", "Endpoints with control blocks of their own; see bench/sharing.h.")
      .def(py::init<const TransportOptions&, int, bool>(), "options"_a, "endpoints"_a, "thread_safe"_a)
      .def("address", [](const SharingBench& b) { return py::bytes(b.address()); })
      .def("connect", &SharingBench::connect)
      .def("provider", &SharingBench::provider)
      .def("run", &run_sharing, "threads"_a, "window"_a, "bytes"_a, "write"_a, "shared"_a, "duration_s"_a,
           "timeout_s"_a)
      .def("end_round", &SharingBench::end_round, py::call_guard<py::gil_scoped_release>())
      .def("serve", &SharingBench::serve, py::call_guard<py::gil_scoped_release>());
}

} // namespace tsn::bench
