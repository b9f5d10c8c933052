#include "tilescale_net/csrc/simulator/bindings.h"
#include "explorer.h"
#include "tilescale_net/csrc/common/python.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace tsn {

namespace {

struct Ranks {
  std::vector<std::vector<std::shared_ptr<sim::BoundLaunch>>> kernels;
  explore::Setup setup;
  py::object holds;
  std::unique_ptr<explore::Explorer> explorer;

  explore::Explorer& ready() {
    if (explorer) return *explorer;
    for (size_t r = 0; r < kernels.size(); ++r)
      for (const auto& kernel : kernels[r]) {
        sim::Launch launch = kernel->launch;
        launch.seed = 1;
        launch.races = setup.races;
        launch.heap = setup.ranks[r].heap;
        setup.ranks[r].launches.push_back(std::move(launch));
      }
    const auto judge = [this]() -> std::string {
      py::gil_scoped_acquire gil;
      return holds().cast<std::string>();
    };
    const auto interrupted = [] {
      py::gil_scoped_acquire gil;
      return PyErr_CheckSignals() != 0;
    };
    explorer = std::make_unique<explore::Explorer>(setup, judge, interrupted);
    return *explorer;
  }
};

py::dict as_dict(const explore::Result& r) {
  if (PyErr_Occurred()) throw py::error_already_set();
  return dict_of(TSN_NAMED(r.schedules, r.cut, r.states, r.events, r.complete, r.failure, r.not_followed, r.gave_up,
                           r.seed, r.preemptions, r.schedule, r.texts));
}

template <typename F>
py::dict run(Ranks& ranks, F f) {
  explore::Explorer& explorer = ranks.ready();
  explore::Result result;
  {
    py::gil_scoped_release release;
    result = f(explorer);
  }
  return as_dict(result);
}

} // namespace

void bind_explorer(py::module_& m) {
  py::class_<Ranks>(m, "Exploration", "All ranks of a small job in this process, under chosen schedules.")
      .def(py::init([](const std::vector<std::pair<uint64_t, uint64_t>>& heaps_and_errors,
                       const std::vector<std::pair<uint64_t, uint64_t>>& memory,
                       const std::vector<std::pair<uint64_t, uint64_t>>& unseen, size_t stack_bytes, bool races,
                       py::object holds) {
             auto made = std::make_unique<Ranks>();
             made->kernels.resize(heaps_and_errors.size());
             for (const auto& [heap, error] : heaps_and_errors) made->setup.ranks.push_back({{}, heap, error});
             for (const auto& [address, bytes] : memory) made->setup.memory.push_back({address, bytes, {}});
             made->setup.unseen = unseen;
             made->setup.stack_bytes = stack_bytes;
             made->setup.races = races;
             made->holds = std::move(holds);
             return made;
           }),
           py::arg("ranks"), py::arg("memory"), py::arg("unseen"), py::arg("stack_bytes"), py::arg("races"),
           py::arg("holds"))
      .def(
          "add_kernel",
          [](Ranks& r, size_t rank, std::shared_ptr<sim::BoundLaunch> launch) {
            r.kernels.at(rank).push_back(std::move(launch));
          },
          py::arg("rank"), py::arg("launch"))
      .def(
          "all",
          [](Ranks& r, uint64_t schedules, double seconds, int preemptions, bool reduce) {
            return run(r, [&](explore::Explorer& e) { return e.all({schedules, seconds, preemptions, reduce}); });
          },
          py::arg("schedules"), py::arg("seconds"), py::arg("preemptions"), py::arg("reduce") = true)
      .def(
          "random",
          [](Ranks& r, uint64_t first_seed, uint64_t seeds, int depth, double seconds) {
            return run(r, [&](explore::Explorer& e) { return e.random(first_seed, seeds, depth, seconds); });
          },
          py::arg("first_seed"), py::arg("seeds"), py::arg("depth"), py::arg("seconds"))
      .def(
          "repeat",
          [](Ranks& r, const std::vector<int>& schedule, double seconds) {
            return run(r, [&](explore::Explorer& e) { return e.repeat(schedule, seconds); });
          },
          py::arg("schedule"), py::arg("seconds"));
}

} // namespace tsn
