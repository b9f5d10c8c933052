// The module benchmark.instruments: each instrument adds its part.
#pragma once

#include <pybind11/pybind11.h>

namespace tsn::bench {

void bind_bare_writer(pybind11::module_& m);
void bind_queue(pybind11::module_& m);
// sharing.cpp; without libfabric's headers, csrc/no_fabric has one that raises ConfigurationError.
void bind_sharing(pybind11::module_& m);

} // namespace tsn::bench
