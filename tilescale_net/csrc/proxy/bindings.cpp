// Python's view of the proxy. runtime/proxy.py drives it; addresses are integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "tilescale_net/csrc/cuda/driver.h"
#include "tilescale_net/csrc/proxy/null_transport.h"
#include "tilescale_net/csrc/proxy/proxy.h"
#include "tilescale_net/device/add_mailbox.h"

#include <cmath>
#include <optional>

namespace py = pybind11;

namespace tsn::proxy {
namespace {

template <class T>
void set(py::handle value, const std::string& name, T& field) {
  try {
    field = value.cast<T>();
  } catch (const py::cast_error&) {
    throw py::type_error("Proxy: " + name + " cannot be " + py::repr(value).cast<std::string>());
  }
}

ProxyOptions options_from(const py::kwargs& kwargs) {
  ProxyOptions o;
  std::string kind = "host";
  uint64_t base = 0;
  std::optional<bool> dedicated;
  for (const auto& item : kwargs) {
    const std::string name = item.first.cast<std::string>();
    const py::handle v = item.second;
    if (name == "rank") set(v, name, o.rank);
    else if (name == "n_pes") set(v, name, o.n_pes);
    else if (name == "peers") set(v, name, o.peers);
    else if (name == "heap_base") set(v, name, base);
    else if (name == "heap_bytes") set(v, name, o.heap.bytes);
    else if (name == "heap_kind") set(v, name, kind);
    else if (name == "device") set(v, name, o.heap.device);
    else if (name == "defers_adds") set(v, name, o.defers_adds);
    else if (name == "abort_word") set(v, name, o.abort_word);
    else if (name == "queues") set(v, name, o.queues);
    else if (name == "threads") set(v, name, o.threads);
    else if (name == "capacity") set(v, name, o.capacity);
    else if (name == "cpus") set(v, name, o.cpus);
    else if (name == "dedicated") dedicated = v.cast<bool>();
    else if (name == "chunk_bytes") set(v, name, o.chunk_bytes);
    else if (name == "inline_bytes") set(v, name, o.inline_bytes);
    else if (name == "force_staging") set(v, name, o.force_staging);
    else if (name == "staging_bytes") set(v, name, o.staging_bytes);
    else if (name == "group_window") set(v, name, o.window.groups);
    else if (name == "mark_window") set(v, name, o.window.marks);
    else if (name == "timeout") set(v, name, o.timeout);
    else if (name == "first_position") set(v, name, o.first_position);
    else if (name == "trace") set(v, name, o.trace);
    else if (name == "print_stats") set(v, name, o.print_stats);
    else if (name == "trust_last_chunk") set(v, name, o.trust_last_chunk);
    else if (name == "provider") set(v, name, o.transport.provider);
    else if (name == "interface") set(v, name, o.transport.interface);
    else if (name == "multi_host") set(v, name, o.transport.multi_host);
    else if (name == "gpu_pci") set(v, name, o.transport.gpu_pci);
    else if (name == "rails") set(v, name, o.transport.rails);
    else if (name == "max_rails") set(v, name, o.transport.max_rails);
    else if (name == "depth") set(v, name, o.transport.depth);
    else if (name == "chaos") set(v, name, o.transport.chaos);
    else if (name == "library") set(v, name, o.transport.library);
    else if (name == "library_fallback") set(v, name, o.transport.library_fallback);
    else throw py::type_error("Proxy has no option '" + name + "'");
  }
  if (kind != "host" && kind != "cuda")
    throw py::value_error("Proxy: heap_kind is 'host' or 'cuda', not '" + kind + "'");
  o.heap.base = reinterpret_cast<void*>(base);
  o.heap.kind = kind == "cuda" ? Memory::cuda : Memory::host;
  o.transport.rank = o.rank;
  o.transport.device_memory = kind == "cuda";
  o.dedicated = dedicated.value_or(kind == "cuda"); // machines with GPUs have cores to spare
  return o;
}

py::object whole(double v) {
  if (v == std::floor(v) && std::fabs(v) < 9e15) return py::int_((int64_t)v);
  return py::float_(v);
}

} // namespace

void bind(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const CudaError& e) {
      py::object type = py::module_::import("tilescale_net.errors").attr("TileScaleError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<Proxy>(m, "Proxy",
                    "The proxy of one PE: queues, threads, endpoints. Keyword arguments are the fields of "
                    "csrc/proxy/options.h and, for the network, of TransportOptions (provider, interface, multi_host, "
                    "gpu_pci, rails, max_rails, depth, chaos, library, library_fallback); heap_base, heap_bytes, "
                    "heap_kind ('host' or 'cuda') and device describe the heap.")
      .def(py::init([](const py::kwargs& kwargs) {
        const ProxyOptions o = options_from(kwargs);
        py::gil_scoped_release release;
        return std::make_unique<Proxy>(o, make_transport_or_null);
      }))
      .def(
          "address", [](const Proxy& p) { return py::bytes(p.address()); }, "What every peer's connect() needs.")
      .def("connect", &Proxy::connect, py::arg("addresses"), no_gil, "addresses[pe]: address() of every PE.")
      .def("start", &Proxy::start, no_gil)
      .def("drain", &Proxy::drain, py::arg("seconds"), no_gil,
           "Waits until everything pushed so far is at its target; False: not in time, or the proxy has failed.")
      .def("apply_adds", &Proxy::apply_adds, py::arg("seconds"), no_gil,
           "Carries out the adds that were left to kernels; while no kernel runs. False as drain().")
      .def("explain", &Proxy::explain, py::arg("reason"), "What peers are told when the abort word ends this proxy.")
      .def("close", &Proxy::close, no_gil, "stop(), and the endpoints are gone; to be called after a barrier.")
      .def("stop", &Proxy::stop, no_gil, "Finishes what is queued and ends the threads; to be called after a barrier.")
      .def(
          "queue_views",
          [](const Proxy& p) {
            const auto views = p.views();
            return py::bytes(reinterpret_cast<const char*>(views.data()), views.size() * sizeof(QueueView));
          },
          "The QueueView array that Context::queues points to, to be placed where the device reads fast.")
      .def_property_readonly(
          "context_flags",
          [](const Proxy& p) {
            return adds_are_deferred(p.options()) ? (uint32_t)p.options().threads << kAddMailboxShift : 0u;
          },
          "What Context::flags must contain for this proxy.")
      .def(
          "error",
          [](Proxy& p) -> py::object {
            Failure f;
            if (!p.failure(&f)) return py::none();
            py::dict d;
            d["kind"] = f.kind;
            // Part of it may be what a peer has sent.
            d["text"] = py::reinterpret_steal<py::object>(
                PyUnicode_DecodeUTF8(f.text.data(), (Py_ssize_t)f.text.size(), "replace"));
            d["pe"] = f.pe;
            d["operation"] = f.operation;
            d["offset"] = f.offset;
            return d;
          },
          "None, or what ended the proxy: kind (a class of tilescale_net.errors), text, pe, operation, offset.")
      .def(
          "stats",
          [](const Proxy& p) {
            py::dict d;
            for (const auto& [name, value] : p.stats()) d[name.c_str()] = whole(value);
            return d;
          },
          "Counters since the start: operations by kind, bytes, retries, depths, and times of each stage in "
          "microseconds. Percentiles are exact to a factor of two.")
      .def(
          "properties",
          [](const Proxy& p) {
            const Properties& t = p.properties();
            py::dict d;
            d["provider"] = t.provider;
            d["version"] = t.version;
            d["library"] = t.library;
            d["interface"] = t.interface;
            d["rails"] = t.rails;
            d["staged"] = p.staged();
            d["delivery_complete"] = t.delivery_complete;
            d["emulated_write"] = t.emulated_write;
            d["chunk_bytes"] = p.chunk_bytes();
            return d;
          },
          "The transport in use, and how the proxy uses it.");
}

} // namespace tsn::proxy
