// A launch from Python, with its data for the running grid.
#pragma once

#include "kernel.h"

#include <pybind11/pybind11.h>

namespace tsn {
namespace sim {

struct BoundLaunch {
  // `bytes`: the kernel's arguments, eight bytes each. Throws std::runtime_error when the library has no such kernel.
  BoundLaunch(pybind11::object from, const std::string& kernel, const std::string& bytes)
      : library(std::move(from)), words((bytes.size() + 7) / 8) {
    memcpy(words.data(), bytes.data(), bytes.size());
    launch.arguments = words.data();
    library.cast<const Library&>().bind(kernel, launch);
  }
  BoundLaunch(const BoundLaunch&) = delete;
  BoundLaunch& operator=(const BoundLaunch&) = delete;

  pybind11::object library; // holds the code
  std::vector<uint64_t> words;
  Launch launch;
};

} // namespace sim

void bind_explorer(pybind11::module_& m); // of csrc/explore

} // namespace tsn
