// Python's view of what the proxy is measured with and against.
#include <pybind11/pybind11.h>

#include "tilescale_net/csrc/bench/bare_writer.h"
#include "tilescale_net/csrc/bench/dispatch_rate.h"
#include "tilescale_net/csrc/bench/flag_echo.h"
#include "tilescale_net/csrc/common/keyword_fields.h"

namespace py = pybind11;

namespace tsn::bench {
namespace {

BareWriterOptions options_from(const TransportOptions& transport, const py::kwargs& kwargs) {
  BareWriterOptions o;
  o.transport = transport;
  std::string kind = "host";
  KeywordFields("BareWriter")
      .add("bytes", o.bytes)
      .add("base", o.base)
      .add("heap_kind", kind)
      .add("device", o.device)
      .add("force_staging", o.staged)
      .add("chunk_bytes", o.chunk_bytes)
      .add("window", o.window)
      .add("dedicated", o.dedicated)
      .add("timeout", o.timeout)
      .set(kwargs);
  if (kind != "host" && kind != "cuda") throw py::value_error("heap_kind is 'host' or 'cuda', not '" + kind + "'");
  o.cuda = kind == "cuda";
  return o;
}

} // namespace

void bind_proxy(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<BareWriter>(m, "BareWriter",
                         "A CPU that writes to a peer without a proxy: the provider's limit. Keyword arguments are the "
                         "fields of csrc/bench/bare_writer.h; base, heap_kind ('host' or 'cuda') and device describe "
                         "the memory. Times are in seconds.")
      .def(py::init([](const TransportOptions& transport, const py::kwargs& kwargs) {
        const BareWriterOptions o = options_from(transport, kwargs);
        py::gil_scoped_release release;
        return std::make_unique<BareWriter>(o);
      }))
      .def("address", [](const BareWriter& w) { return py::bytes(w.address()); })
      .def("connect", &BareWriter::connect, py::arg("peer"), py::arg("address"), no_gil)
      .def("write", &BareWriter::write, py::arg("peer"), py::arg("bytes"), py::arg("count"),
           py::arg("blocking") = false, py::arg("from_peer") = -1, no_gil)
      .def("ping", &BareWriter::ping, py::arg("peer"), py::arg("bytes"), py::arg("count"), no_gil)
      .def("pong", &BareWriter::pong, py::arg("peer"), py::arg("bytes"), py::arg("count"), no_gil)
      .def("serve", &BareWriter::serve, py::arg("peer"), no_gil)
      .def("finish", &BareWriter::finish, py::arg("peer"), no_gil);

  py::class_<FlagEcho>(m, "FlagEcho",
                       "A CPU thread that copies the word at `ping` to the word at `pong`, in memory that the device "
                       "reaches like a queue's. It runs as long as the object lives.")
      .def(py::init<bool, int>(), py::arg("cuda"), py::arg("cpu") = -1, no_gil)
      .def_property_readonly("ping", &FlagEcho::ping, "The device's address of the word that it stores to.")
      .def_property_readonly("pong", &FlagEcho::pong, "The device's address of the answer.");

  m.def(
      "measure_dispatch",
      [](uint64_t descriptors, uint64_t bytes, bool with_signal, int cpu) {
        const DispatchRate r = measure_dispatch(descriptors, bytes, with_signal, cpu);
        return (double)r.descriptors / r.seconds;
      },
      py::arg("descriptors") = 1 << 22, py::arg("bytes") = 4096, py::arg("with_signal") = false, py::arg("cpu") = -1,
      no_gil, "Descriptors per second that one proxy thread takes and hands to a transport that completes at once.");
}

} // namespace tsn::bench
