#include "bindings.h"

#include "explorer.h"
#include "tilescale_net/csrc/simulator/kernel.h"

#include <array>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace tsn {

namespace {

// A kernel of a rank, as the Python side knows it; keeps what the launch points to.
struct Kernel {
  py::object library;
  std::vector<uint64_t> words;
  sim::Launch launch;
};

struct Ranks {
  std::vector<std::vector<Kernel>> kernels;
  explore::Setup setup;
  py::object holds;
  std::unique_ptr<explore::Explorer> explorer;

  void add_kernel(size_t rank, py::object library, const std::string& kernel, py::bytes arguments,
                  std::array<unsigned, 3> grid, std::array<unsigned, 3> block, uint64_t shared_bytes,
                  uint64_t resident_blocks, bool communicates, const std::vector<std::string>& lines) {
    Kernel made;
    made.library = library;
    library.cast<sim::Library&>().bind(kernel, made.launch);
    const std::string text = arguments;
    made.words.resize((text.size() + 7) / 8);
    memcpy(made.words.data(), text.data(), text.size());
    sim::Launch& l = made.launch;
    l.grid = {grid[0], grid[1], grid[2]};
    l.block = {block[0], block[1], block[2]};
    l.shared_bytes = shared_bytes;
    l.seed = 1;
    l.resident_blocks = resident_blocks;
    l.communicates = communicates;
    l.races = setup.races;
    l.heap = setup.ranks[rank].heap;
    l.lines = lines;
    kernels[rank].push_back(std::move(made));
  }

  explore::Explorer& ready() {
    if (explorer) return *explorer;
    for (size_t r = 0; r < kernels.size(); ++r)
      for (Kernel& kernel : kernels[r]) {
        kernel.launch.arguments = kernel.words.data();
        setup.ranks[r].launches.push_back(kernel.launch);
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

py::dict told(const explore::Result& r) {
  if (PyErr_Occurred()) throw py::error_already_set();
  py::dict d;
  d["schedules"] = r.schedules;
  d["cut"] = r.cut;
  d["states"] = r.states;
  d["events"] = r.events;
  d["complete"] = r.complete;
  d["failure"] = r.failure;
  d["gave_up"] = r.gave_up;
  d["seed"] = r.seed;
  d["preemptions"] = r.preemptions;
  d["schedule"] = r.schedule;
  d["texts"] = r.texts;
  return d;
}

template <typename F>
py::dict run(Ranks& ranks, F f) {
  explore::Explorer& explorer = ranks.ready();
  explore::Result result;
  {
    py::gil_scoped_release release;
    result = f(explorer);
  }
  return told(result);
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
      .def("add_kernel", &Ranks::add_kernel, py::arg("rank"), py::arg("library"), py::arg("kernel"),
           py::arg("arguments"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"), py::arg("resident_blocks"),
           py::arg("communicates"), py::arg("lines"))
      .def(
          "all",
          [](Ranks& r, uint64_t schedules, double seconds, int preemptions, bool reduce) {
            return run(r, [&](explore::Explorer& e) { return e.all({schedules, seconds, preemptions, reduce}); });
          },
          py::arg("schedules"), py::arg("seconds"), py::arg("preemptions"), py::arg("reduce") = true)
      .def(
          "random",
          [](Ranks& r, uint64_t first_seed, uint64_t seeds, int depth) {
            return run(r, [&](explore::Explorer& e) { return e.random(first_seed, seeds, depth); });
          },
          py::arg("first_seed"), py::arg("seeds"), py::arg("depth"))
      .def(
          "repeat",
          [](Ranks& r, const std::vector<int>& schedule) {
            return run(r, [&](explore::Explorer& e) { return e.repeat(schedule); });
          },
          py::arg("schedule"));
}

} // namespace tsn
