// The module tilescale_net._simulator.
#include "bindings.h"
#include "happens_before.h"
#include "kernel.h"
#include "live_state.h"
#include "memory.h"
#include "race_memory.h"
#include "remote.h"
#include "rules.h"
#include "tilescale_net/csrc/common/python.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace tsn {

namespace {

py::dict state_now() {
  const sim::LiveState s = sim::live_state();
  py::dict d = dict_of(TSN_NAMED(s.kernel, s.began_ns, s.deadlock));
  py::list waits;
  for (const sim::LiveWait& w : s.waits) {
    const sim::WaitSubject& of = w.subject;
    py::dict e = dict_of(TSN_NAMED(w.block, of.operation, of.pe, of.wanted, of.comparison, w.since_ns));
    e["thread"] = w.linear;
    e["line"] = sim::entry_at(s.lines, w.line);
    e["word"] = reinterpret_cast<uint64_t>(of.word);
    e["has"] = static_cast<int64_t>(w.has);
    waits.append(e);
  }
  d["waits"] = waits;
  return d;
}

py::list sent(size_t most) {
  py::list out;
  for (const sim::SentSignal& s : sim::sent_signals(most))
    out.append(py::make_tuple(s.pe, s.word, s.count, static_cast<int64_t>(s.value), s.at_ns, s.line));
  return out;
}

bool check_interrupt() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Returns (failure, message, line, remark, limits, switches); failure is 0 when the grid ran to its end.
py::tuple run(const sim::BoundLaunch& bound, uint64_t seed, double stall_seconds, double race_seconds,
              size_t stack_bytes, bool races, uint64_t heap) {
  sim::Launch launch = bound.launch;
  launch.seed = seed;
  launch.stall_seconds = stall_seconds;
  launch.race_seconds = race_seconds;
  launch.check_interrupt = check_interrupt;
  launch.races = races;
  launch.heap = heap;
  sim::Outcome outcome;
  {
    py::gil_scoped_release release;
    outcome = sim::run(launch, stack_bytes);
  }
  if (outcome.failure == sim::Failure::interrupted) throw py::error_already_set();
  return py::make_tuple(static_cast<int>(outcome.failure), outcome.message, outcome.line, outcome.remark,
                        outcome.limits, outcome.switches);
}

void bind_launch(py::module_& m) {
  py::class_<sim::Library>(m, "Library", "A compiled kernel library.")
      .def(py::init<const std::string&>(), py::arg("path"));
  using Extents = std::array<unsigned, 3>;
  py::class_<sim::BoundLaunch, std::shared_ptr<sim::BoundLaunch>>(m, "Launch", "A kernel with its arguments.")
      .def(py::init([](py::object library, const std::string& kernel, const std::string& arguments, Extents grid,
                       Extents block, uint64_t shared_bytes, uint64_t resident_blocks, bool communicates,
                       std::vector<std::string> lines, std::vector<std::string> names) {
             auto made = std::make_shared<sim::BoundLaunch>(std::move(library), kernel, arguments);
             sim::Launch& l = made->launch;
             l.grid = {grid[0], grid[1], grid[2]};
             l.block = {block[0], block[1], block[2]};
             l.shared_bytes = shared_bytes;
             l.resident_blocks = resident_blocks;
             l.communicates = communicates;
             l.lines = std::move(lines);
             l.names = std::move(names);
             return made;
           }),
           py::arg("library"), py::arg("kernel"), py::arg("arguments"), py::kw_only(), py::arg("grid"),
           py::arg("block"), py::arg("shared_bytes"), py::arg("resident_blocks"), py::arg("communicates"),
           py::arg("lines"), py::arg("names"))
      .def("run", run, py::kw_only(), py::arg("seed"), py::arg("stall_seconds"), py::arg("race_seconds"),
           py::arg("stack_bytes"), py::arg("races"), py::arg("heap"));
}

void bind_live_state(py::module_& m) {
  m.def("live_state", state_now,
        "The kernel that runs (its name, or empty) and its threads that wait; after a thread gave up, as it was then.");
  m.def("trace_start", sim::trace_start, py::arg("path"), py::arg("heap_base"),
        py::call_guard<py::gil_scoped_release>(), "Write events to the ring in a file.");
  m.def("trace_stop", sim::trace_stop, py::call_guard<py::gil_scoped_release>(), "Write no more.");
  m.def("sent_signals", sent, py::arg("most"), "(pe, local address, count, last value, when, line) of signals sent.");
}

} // namespace

void bind_simulator(py::module_& m) {
  bind_launch(m);
  bind_live_state(m);
  bind_explorer(m);
  m.attr("API_VERSION") = sim::kApiVersion;
  m.def(
      "rules",
      [] {
        py::list out;
        for (const sim::Rule& rule : sim::rules()) {
          py::dict d = dict_of(TSN_NAMED(rule.of_schedules, rule.what, rule.followed, rule.not_followed, rule.where));
          d["named"] = rule.gap != sim::Gap::none;
          out.append(d);
        }
        return out;
      },
      "Coverage and gaps of the race detector and of the exploration of schedules; where a run names a gap.");
  m.def(
      "register_heap",
      [](uint64_t base, uint64_t bytes, bool host_is_followed) {
        sim::register_heap(base, bytes);
        if (!host_is_followed) sim::note_ended_launches(base);
      },
      py::arg("base"), py::arg("bytes"), py::arg("host_is_followed") = false,
      "Set the heap of the next launches. If the host is not followed, they come after everything that other ranks "
      "have finished.");
  m.def("host_meets", sim::note_ended_launches_of_all, "The hosts of all ranks have met.");
  m.def("host_comes", sim::host_comes, py::arg("base"), "The host comes to a meeting of all ranks of this heap.");
  m.def("host_has_met", sim::host_has_met, py::arg("base"), "The meeting is over.");
  m.def("host_access", sim::host_access, py::arg("base"), py::arg("runs"), py::arg("store"), py::arg("name"),
        py::arg("line"),
        "The host loads from or stores to its heap, at these addresses and sizes: an error, or nothing.");
  m.def("add_alias", sim::add_alias, py::arg("base"), py::arg("runs"), py::arg("element"), py::arg("line"),
        "Host code may write these addresses and sizes of the heap unseen, elements of so many bytes: the number of "
        "the alias.");
  m.def("drop_alias", sim::drop_alias, py::arg("base"), py::arg("number"));
  m.def("take_aliases", sim::take_aliases, py::arg("base"), py::arg("still_changing") = false,
        "Save the current contents of aliases.");
  m.def("alias_access", sim::alias_access, py::arg("base"), py::arg("name"),
        "Check the host's writes through aliases since then: an error, or nothing.");
  m.def(
      "unregister_heap",
      [](uint64_t base) {
        sim::flush_pending();
        sim::unregister_heap(base);
        sim::detach_race_memory(base);
        sim::forget_sent_signals();
      },
      py::arg("base"), "Forget a heap and its allocations.");
  m.def("race_memory_bytes", sim::race_memory_bytes, py::arg("heap_bytes"),
        "Bytes of a rank's shared memory of the race detector, for a heap of that size.");
  m.def("attach_race_memory", sim::attach_race_memory, py::arg("me"), py::arg("base"), py::arg("bytes"),
        py::arg("pages"), py::arg("heaps"),
        "Give a heap the race memories of all ranks, and the addresses of their heaps (0: not mapped).");
  m.def("register_allocation", sim::register_allocation, py::arg("base"), py::arg("bytes"), py::arg("name"));
  m.def("unregister_allocation", [](uint64_t base) {
    sim::flush_pending(); // nothing may arrive in memory that is handed out again
    sim::unregister_allocation(base);
  });
  m.def("flush_pending", sim::flush_pending, py::call_guard<py::gil_scoped_release>(),
        "Deliver all remote writes that this rank has issued.");
  m.def("pending_operations", sim::pending_operations);
  m.def(
      "set_visibility",
      [](const std::string& name) {
        if (name == "eager") sim::set_visibility(sim::Visibility::eager);
        else if (name == "late") sim::set_visibility(sim::Visibility::late);
        else if (name == "random") sim::set_visibility(sim::Visibility::random);
        else throw py::value_error("visibility '" + name + "' is not one of eager, late, random");
      },
      py::arg("name"));
}

} // namespace tsn

PYBIND11_MODULE(_simulator, m) {
  m.doc() = "Runs generated CUDA kernels on the CPU: fibers, seeded scheduling, late remote writes.";
  tsn::bind_simulator(m);
}
