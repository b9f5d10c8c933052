// Python bindings of the fabric: offers, options, and a Transport for tests and scripts (one call per operation).
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/testing/chaos.h"
#include "transport.h"

namespace py = pybind11;

namespace tsn::fabric {
namespace {

TransportOptions options_from(const py::kwargs& kwargs) {
  TransportOptions o;
  KeywordFields("TransportOptions")
      .add(TSN_NAMED(o.rank, o.provider, o.interface, o.multi_host, o.address, o.one_sided, o.device_memory, o.gpu_pci,
                     o.rails, o.max_rails, o.depth, o.message_bytes, o.message_buffers, o.delivery_complete, o.library,
                     o.library_fallback, o.chaos))
      .set(kwargs);
  return o;
}

// True: posted; False: try again after poll(). Raises FabricError for a rejected operation.
bool answer(Transport& transport, Post post) {
  if (post == Post::error) throw FabricError(transport.last_error());
  return post == Post::ok;
}

Transport::Copy copy_of(int peer, Region local, RemoteRegion remote, uint64_t local_offset, uint64_t remote_offset,
                        uint64_t bytes, uint64_t cookie, std::optional<uint32_t> imm, int rail, bool more) {
  return {rail,  peer,   local,           remote, local_offset,   remote_offset,
          bytes, cookie, imm.has_value(), more,   imm.value_or(0)};
}

py::list poll(Transport& transport, int capacity) {
  static const char* const kinds[] = {"done", "immediate", "message", "failed"};
  std::vector<Event> events(capacity);
  const int n = transport.poll(events.data(), capacity);
  py::list list;
  for (int i = 0; i < n; ++i) {
    const Event& e = events[i];
    py::dict d = dict_of(TSN_NAMED(e.peer, e.rail, e.imm, e.bytes, e.code));
    d["kind"] = kinds[e.kind];
    d["cookie"] = e.cookie == kSilent ? py::object(py::none()) : py::int_(e.cookie);
    d["data"] = e.data ? py::object(py::bytes(static_cast<const char*>(e.data), e.bytes)) : py::none();
    d["text"] = e.text ? py::object(py::str(e.text)) : py::none();
    list.append(d);
  }
  return list;
}

// Posting operations; each returns the result of answer().
void bind_posts(py::class_<Transport>& transport) {
  transport
      .def(
          "write",
          [](Transport& t, int peer, Region local, RemoteRegion remote, uint64_t bytes, uint64_t local_offset,
             uint64_t remote_offset, uint64_t cookie, std::optional<uint32_t> imm, int rail, bool more) {
            return answer(t, t.post_write(copy_of(peer, local, remote, local_offset, remote_offset, bytes, cookie, imm,
                                                  rail, more)));
          },
          py::arg("peer"), py::arg("local"), py::arg("remote"), py::arg("bytes"), py::arg("local_offset") = 0,
          py::arg("remote_offset") = 0, py::arg("cookie") = kSilent, py::arg("imm") = py::none(), py::arg("rail") = 0,
          py::arg("more") = false)
      .def(
          "read",
          [](Transport& t, int peer, Region local, RemoteRegion remote, uint64_t bytes, uint64_t local_offset,
             uint64_t remote_offset, uint64_t cookie, int rail, bool more) {
            return answer(t, t.post_read(copy_of(peer, local, remote, local_offset, remote_offset, bytes, cookie,
                                                 std::nullopt, rail, more)));
          },
          py::arg("peer"), py::arg("local"), py::arg("remote"), py::arg("bytes"), py::arg("local_offset") = 0,
          py::arg("remote_offset") = 0, py::arg("cookie") = kSilent, py::arg("rail") = 0, py::arg("more") = false)
      .def(
          "message",
          [](Transport& t, int peer, const std::string& data, uint64_t cookie, int rail) {
            return answer(t, t.post_message(rail, peer, data.data(), static_cast<uint32_t>(data.size()), cookie));
          },
          py::arg("peer"), py::arg("data"), py::arg("cookie") = kSilent, py::arg("rail") = 0)
      .def(
          "send",
          [](Transport& t, int peer, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie, int rail) {
            return answer(t, t.post_send(rail, peer, local, offset, bytes, cookie));
          },
          py::arg("peer"), py::arg("local"), py::arg("offset"), py::arg("bytes"), py::arg("cookie") = kSilent,
          py::arg("rail") = 0)
      .def(
          "receive",
          [](Transport& t, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie, int rail) {
            return answer(t, t.post_receive(rail, local, offset, bytes, cookie));
          },
          py::arg("local"), py::arg("offset"), py::arg("bytes"), py::arg("cookie"), py::arg("rail") = 0);
}

} // namespace

void bind(py::module_& m) {
  translate<FabricError>("FabricError");

  py::class_<TransportOptions>(m, "TransportOptions",
                               "Options of a transport; fields are keyword arguments, see fabric/transport.h.")
      .def(py::init(&options_from))
      .def_readwrite("rank", &TransportOptions::rank)
      .def_readwrite("provider", &TransportOptions::provider)
      .def_readwrite("interface", &TransportOptions::interface)
      .def_readwrite("chaos", &TransportOptions::chaos)
      .def_readwrite("library_fallback", &TransportOptions::library_fallback);

  bind_libfabric(m);
  m.def(
      "parse_chaos", [](const std::string& text) { testing::parse_chaos(text); },
      "Raises FabricError naming the wrong field; see testing/chaos.h for the fields.");

  py::class_<Transport> transport(m, "Transport",
                                  "A transport driven from Python; see fabric/transport.h for the rules.");
  transport
      .def(py::init([](const TransportOptions& options) { return make_transport(options); }),
           py::call_guard<py::gil_scoped_release>())
      .def("properties", [](const Transport& t) { return properties_of(t.properties()); })
      .def("address", [](const Transport& t) { return py::bytes(t.address()); })
      .def("connect", &Transport::connect)
      .def(
          "register_memory",
          [](Transport& t, uint64_t base, uint64_t bytes, const std::string& kind, int device) {
            return t.register_memory({reinterpret_cast<void*>(base), bytes, memory_kind("kind", kind), device});
          },
          py::arg("base"), py::arg("bytes"), py::arg("kind") = "host", py::arg("device") = 0)
      .def("release_memory", &Transport::release_memory)
      .def("region_key", [](const Transport& t, Region region) { return py::bytes(t.region_key(region)); })
      .def("add_remote", &Transport::add_remote)
      .def("rejected_messages", &Transport::rejected_messages,
           "Messages dropped because their sender did not know this one's token.")
      .def("poll", &poll, py::arg("capacity") = 64);
  bind_posts(transport);
}

} // namespace tsn::fabric
