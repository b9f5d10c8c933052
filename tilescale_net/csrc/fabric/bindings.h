// What other folders' bindings share with the fabric's.
#pragma once

#include <pybind11/pybind11.h>

#include "transport.h"

namespace tsn::fabric {

// All of Properties as a dict.
pybind11::dict properties_of(const Properties& properties);

// What is compiled against libfabric's headers; without them, functions that raise ConfigurationError.
void bind_libfabric(pybind11::module_& m);

} // namespace tsn::fabric

namespace tsn::bench {

// The benchmark of shared endpoints; bind_libfabric adds it.
void bind_sharing(pybind11::module_& m);

} // namespace tsn::bench
