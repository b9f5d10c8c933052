// Python's view of the fabric benchmarks' loops: one call per measurement.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bandwidth.h"
#include "peak.h"
#include "ping_pong.h"
#include "tilescale_net/csrc/fabric/bindings.h"

namespace py = pybind11;
using namespace py::literals;

namespace tsn::bench {

void bind_proxy(py::module_& m);

namespace {

Transfer operation_from(const std::string& name) {
  if (name == "send") return Transfer::send;
  if (name == "write") return Transfer::write;
  if (name == "read") return Transfer::read;
  throw py::value_error("operation is send, write or read, not '" + name + "'");
}

py::dict bandwidth(Session& session, int peer, const std::string& operation, uint64_t bytes, uint64_t iterations,
                   double duration_s, uint32_t tx_depth, uint32_t rx_depth, uint32_t post_list, uint32_t recv_post_list,
                   bool initiator, bool stamps) {
  BandwidthOptions o;
  o.operation = operation_from(operation);
  o.bytes = bytes;
  o.iterations = iterations;
  o.duration_s = duration_s;
  o.tx_depth = tx_depth;
  o.rx_depth = rx_depth;
  o.post_list = post_list;
  o.recv_post_list = recv_post_list;
  o.initiator = initiator;
  o.stamps = stamps;
  if (bytes == 0 || bytes > session.bytes() / 2)
    throw py::value_error("bytes=" + std::to_string(bytes) + " is outside 1 to half of the session's buffer, " +
                          std::to_string(session.bytes() / 2));
  if (post_list == 0 || recv_post_list == 0 || tx_depth == 0 || rx_depth == 0)
    throw py::value_error("depths and lists are 1 or more");
  BandwidthResult result;
  {
    py::gil_scoped_release release;
    result = run_bandwidth(session, peer, o);
  }
  return py::dict("iterations"_a = result.iterations, "seconds"_a = result.seconds,
                  "least_s_per_message"_a = result.least_s_per_message);
}

std::vector<double> ping_pong(Session& session, int peer, uint64_t bytes, uint64_t iterations, uint64_t warmup,
                              uint64_t chunk, uint32_t window, bool starter, bool verify, uint64_t device_address,
                              int device) {
  if (bytes == 0 || chunk == 0 || window == 0 || iterations == 0)
    throw py::value_error("bytes, chunk, window and iterations are 1 or more");
  PingPongOptions o;
  o.bytes = bytes;
  o.chunk = chunk;
  o.iterations = iterations;
  o.warmup = warmup;
  o.window = window;
  o.starter = starter;
  o.verify = verify;
  o.device_address = device_address;
  o.device = device;
  py::gil_scoped_release release;
  return run_ping_pong(session, peer, o);
}

} // namespace

void bind(py::module_& m) {
  m.def("least_time_per_message", &least_time_per_message, "posted"_a, "completed"_a,
        "min over i <= j of (completed[j] - posted[i]) / (j - i + 1), in the stamps' unit: perftest's peak.");
  m.def("ping_pong_bytes", &ping_pong_bytes, "bytes"_a, "chunk"_a,
        "Bytes that a session needs; see bench/ping_pong.h.");

  py::class_<Session>(m, "BenchSession", "A transport with a buffer and a meeting point; see bench/session.h.")
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
      .def("bandwidth", &bandwidth, "peer"_a, "operation"_a, "bytes"_a, "iterations"_a = 1000, "duration_s"_a = 0.0,
           "tx_depth"_a = 128, "rx_depth"_a = 512, "post_list"_a = 1, "recv_post_list"_a = 1, "initiator"_a = true,
           "stamps"_a = true, "See bench/bandwidth.h.")
      .def("ping_pong", &ping_pong, "peer"_a, "bytes"_a, "iterations"_a, "warmup"_a, "chunk"_a = 1 << 20,
           "window"_a = 64, "starter"_a = true, "verify"_a = true, "device_address"_a = 0, "device"_a = 0,
           "Seconds of every timed round trip; see bench/ping_pong.h.");

  bind_proxy(m);
}

} // namespace tsn::bench
