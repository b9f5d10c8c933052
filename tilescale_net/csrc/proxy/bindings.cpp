// Python bindings of the proxy, for runtime/fabric.py; addresses are integers.
#include <pybind11/pybind11.h>

#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/fabric/bindings.h"
#include "tilescale_net/csrc/proxy/proxy.h"
#include "tilescale_net/device/add_mailbox.h"

#include <cmath>

namespace py = pybind11;

namespace tsn::proxy {
namespace {

ProxyOptions options_from(const TransportOptions& transport, const py::kwargs& kwargs) {
  ProxyOptions o;
  o.transport = transport;
  std::string heap_kind = "host";
  uint64_t heap_base = 0;
  std::optional<bool> dedicated;
  KeywordFields("Proxy")
      .add(TSN_NAMED(o.rank, o.n_pes, o.peers, heap_base, heap_kind, o.heap.device, o.defers_adds, o.abort_word,
                     o.queues, o.threads, o.peer_threads, o.shared_bytes, o.capacity, o.cpus, o.chunk_bytes,
                     o.inline_bytes, o.force_staging, o.staging_bytes, o.timeout, o.first_position, o.trace,
                     o.print_stats, o.trust_last_chunk, dedicated))
      .add("heap_bytes, group_window, mark_window", o.heap.bytes, o.window.groups, o.window.marks)
      .set(kwargs);
  o.heap.base = reinterpret_cast<void*>(heap_base);
  o.heap.kind = fabric::memory_kind("Proxy: heap_kind", heap_kind);
  o.transport.rank = o.rank;
  o.transport.device_memory = o.heap.kind == Memory::cuda;
  o.dedicated = dedicated.value_or(o.heap.kind == Memory::cuda); // machines with GPUs have cores to spare
  return o;
}

py::object whole(double v) {
  if (v == std::floor(v) && std::fabs(v) < 9e15) return py::int_((int64_t)v);
  return py::float_(v);
}

py::object error_of(Proxy& proxy) {
  Failure f;
  if (!proxy.failure(&f)) return py::none();
  py::dict d = dict_of(TSN_NAMED(f.kind, f.pe, f.operation, f.offset));
  // It may contain a peer's text.
  d["text"] =
      py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(f.text.data(), (Py_ssize_t)f.text.size(), "replace"));
  return d;
}

py::dict stats_of(const Proxy& proxy) {
  py::dict d;
  for (const auto& [name, value] : proxy.stats()) d[name.c_str()] = whole(value);
  return d;
}

py::dict properties_of(const Proxy& p) {
  py::dict d = fabric::properties_of(p.properties());
  d["staged"] = p.staged();
  d["chunk_bytes"] = p.chunk_bytes();
  d["staging_slots"] = p.staging_slots();
  for (const auto& [name, value] : p.sizes()) d[name.c_str()] = value;
  return d;
}

uint32_t context_flags(const Proxy& proxy) {
  const ProxyOptions& o = proxy.options();
  return adds_are_deferred(o) ? (uint32_t)owner_threads(o) << kAddMailboxShift : 0u;
}

} // namespace

void bind(py::module_& m) {
  translate<CudaError>("TileScaleError");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<Proxy>(m, "Proxy",
                    "The proxy of one PE: queues, threads, endpoints. Keyword arguments are the fields of "
                    "csrc/proxy/options.h; heap_base, heap_bytes, heap_kind ('host' or 'cuda') and device describe the "
                    "heap. The transport's rank is the proxy's.")
      .def(py::init([](const TransportOptions& transport, const py::kwargs& kwargs) {
        const ProxyOptions o = options_from(transport, kwargs);
        py::gil_scoped_release release;
        return std::make_unique<Proxy>(o, make_transport);
      }))
      .def(
          "address", [](const Proxy& p) { return py::bytes(p.address()); }, "The address for every peer's connect().")
      .def("connect", &Proxy::connect, py::arg("addresses"), no_gil, "addresses[pe]: address() of every PE.")
      .def("start", &Proxy::start, no_gil)
      .def("drain", &Proxy::drain, py::arg("seconds"), no_gil,
           "Waits until everything pushed so far is at its target; False: not in time, or the proxy has failed.")
      .def("apply_adds", &Proxy::apply_adds, py::arg("seconds"), no_gil,
           "Applies the adds that were deferred to kernels; while no kernel runs. False as drain().")
      .def("exclude", &Proxy::exclude, py::arg("peers"),
           "Excludes PEs, which may end at any time: no rank waits for them.")
      .def("explain", &Proxy::explain, py::arg("reason"), "Sent to peers when the abort word ends this proxy.")
      .def("awaited", &Proxy::awaited, "The PEs that flushes wait for.")
      .def("close", &Proxy::close, no_gil, "stop(), then closes the endpoints; call it after a barrier.")
      .def("stop", &Proxy::stop, no_gil, "Finishes queued operations and ends the threads; call it after a barrier.")
      .def(
          "queue_views",
          [](const Proxy& p) {
            const auto views = p.views();
            return py::bytes(reinterpret_cast<const char*>(views.data()), views.size() * sizeof(QueueView));
          },
          "The QueueView array that Context::queues points to, to be placed where the device reads fast.")
      .def_property_readonly("context_flags", &context_flags, "The bits of Context::flags for this proxy.")
      .def("error", &error_of,
           "None, or the failure that ended the proxy: kind (a class of tilescale_net.errors), text, pe, operation, "
           "offset.")
      .def("stats", &stats_of,
           "Counters since the start: operations by kind, bytes, retries, depths, and times of each stage in "
           "microseconds. Percentiles are exact to a factor of two.")
      .def("properties", &properties_of, "The transport in use, and the proxy's settings of it.");
}

} // namespace tsn::proxy
