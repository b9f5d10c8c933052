// benchmark.instruments: the benchmarks' native loops and probes. Built in a checkout, never in a wheel.
#include <pybind11/pybind11.h>

#include "benchmark/native/instruments.h"
#include "benchmark/native/loops.h"
#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/bindings.h"

namespace py = pybind11;
using namespace py::literals;

namespace tsn::bench {
namespace {

Transfer operation_from(const std::string& name) {
  if (name == "send") return Transfer::send;
  if (name == "write") return Transfer::write;
  if (name == "read") return Transfer::read;
  throw py::value_error("operation is send, write or read, not '" + name + "'");
}

py::dict bandwidth(Session& session, int peer, const std::string& operation, uint64_t bytes, const py::kwargs& kwargs) {
  BandwidthOptions o;
  o.operation = operation_from(operation);
  o.bytes = bytes;
  KeywordFields("bandwidth")
      .add(TSN_NAMED(o.iterations, o.duration_s, o.tx_depth, o.rx_depth, o.post_list, o.recv_post_list, o.initiator,
                     o.stamps))
      .set(kwargs);
  if (bytes == 0 || bytes > session.bytes() / 2)
    throw py::value_error(
        concat("bytes=", bytes, " is outside 1 to half of the session's buffer, ", session.bytes() / 2));
  if (o.post_list == 0 || o.recv_post_list == 0 || o.tx_depth == 0 || o.rx_depth == 0)
    throw py::value_error("depths and lists are 1 or more");
  BandwidthResult result;
  {
    py::gil_scoped_release release;
    result = run_bandwidth(session, peer, o);
  }
  return dict_of(TSN_NAMED(result.iterations, result.seconds, result.least_s_per_message));
}

std::vector<double> ping_pong(Session& session, int peer, uint64_t bytes, const py::kwargs& kwargs) {
  PingPongOptions o;
  o.bytes = bytes;
  KeywordFields("ping_pong")
      .add(TSN_NAMED(o.iterations, o.warmup, o.chunk, o.window, o.starter, o.verify, o.device_address, o.device))
      .set(kwargs);
  if (bytes == 0 || o.chunk == 0 || o.window == 0 || o.iterations == 0)
    throw py::value_error("bytes, chunk, window and iterations are 1 or more");
  py::gil_scoped_release release;
  return run_ping_pong(session, peer, o);
}

void bind_loops(py::module_& m) {
  m.def("least_time_per_message", &least_time_per_message, "posted"_a, "completed"_a,
        "min over i <= j of (completed[j] - posted[i]) / (j - i + 1), in the stamps' unit: perftest's peak.");
  m.def("ping_pong_bytes", &ping_pong_bytes, "bytes"_a, "chunk"_a, "Bytes that a session needs; see loops.h.");

  py::class_<Session>(m, "Session", "A transport with a buffer and a meeting point; see session.h.")
      .def(py::init<const TransportOptions&, int, uint64_t, double, uint64_t, int>(), "options"_a, "peers"_a, "bytes"_a,
           "timeout_s"_a = 30.0, "device_address"_a = 0, "device"_a = 0)
      .def("address", [](const Session& s) { return py::bytes(s.address()); })
      .def("connect", &Session::connect)
      .def("sync", &Session::sync, py::call_guard<py::gil_scoped_release>())
      .def("properties", [](Session& s) { return properties_of(s.transport().properties()); })
      .def("bytes", &Session::bytes)
      .def(
          "fill",
          [](Session& s, uint64_t bytes, uint64_t seed) {
            if (!s.data() || bytes > s.bytes() / 2) throw py::value_error("fill: outside the session's outgoing half");
            fill_pattern(s.data(), bytes, seed);
          },
          "Fills the outgoing half's first bytes with pattern number `seed`.")
      .def(
          "holds",
          [](Session& s, uint64_t bytes, uint64_t seed) {
            if (!s.data() || bytes > s.bytes() / 2) throw py::value_error("holds: outside the session's incoming half");
            return holds_pattern(s.data() + s.bytes() / 2, bytes, seed);
          },
          "Whether the incoming half starts with pattern number `seed`.")
      .def("bandwidth", &bandwidth, "peer"_a, "operation"_a, "bytes"_a,
           "Keyword arguments are the fields of BandwidthOptions (loops.h).")
      .def("ping_pong", &ping_pong, "peer"_a, "bytes"_a,
           "Seconds of every timed round trip. Keyword arguments are the fields of PingPongOptions (loops.h).");
}

} // namespace
} // namespace tsn::bench

PYBIND11_MODULE(instruments, m) {
  m.doc() = "Loops over the fabric, a writer without a proxy, and probes of the device queue: see benchmark/native.";
  // Options of a transport are made there, and its errors become exceptions.
  py::module_::import("tilescale_net._native");
  tsn::translate<tsn::fabric::FabricError>("FabricError");
  tsn::translate<tsn::CudaError>("TileScaleError");
  tsn::bench::bind_loops(m);
  tsn::bench::bind_bare_writer(m);
  tsn::bench::bind_queue(m);
  tsn::bench::bind_sharing(m);
}
