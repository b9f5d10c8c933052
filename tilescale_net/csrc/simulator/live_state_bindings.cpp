#include "live_state_bindings.h"

#include "live_state.h"
#include "trace.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace tsn {

namespace {

std::string line_of(const sim::LiveState& state, int line) {
  return line >= 0 && static_cast<size_t>(line) < state.lines.size() ? state.lines[static_cast<size_t>(line)] : "";
}

py::dict state() {
  const sim::LiveState s = sim::live_state();
  py::dict d;
  d["kernel"] = s.kernel;
  d["began_ns"] = s.began_ns;
  d["deadlock"] = s.deadlock;
  py::list waits;
  for (const sim::LiveWait& w : s.waits) {
    py::dict e;
    e["block"] = w.block;
    e["thread"] = w.linear;
    e["line"] = line_of(s, w.line);
    e["operation"] = w.subject.operation;
    e["pe"] = w.subject.pe;
    e["word"] = reinterpret_cast<uint64_t>(w.subject.word);
    e["wanted"] = w.subject.wanted;
    e["comparison"] = w.subject.comparison;
    e["has"] = static_cast<int64_t>(w.has);
    e["since_ns"] = w.since_ns;
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

} // namespace

void bind_live_state(py::module_& m) {
  m.def("live_state", state,
        "The kernel that runs (its name, or empty) and its threads that wait; after a thread gave up, as it was then.");
  m.def("trace_start", sim::trace_start, py::arg("path"), py::arg("heap_base"),
        py::call_guard<py::gil_scoped_release>(), "Write events to the ring in a file.");
  m.def("trace_stop", sim::trace_stop, py::call_guard<py::gil_scoped_release>(), "Write no more.");
  m.def("sent_signals", sent, py::arg("most"), "(pe, local address, count, last value, when, line) of signals sent.");
}

} // namespace tsn
