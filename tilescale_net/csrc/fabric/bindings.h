// What other folders' bindings share with the fabric's.
#pragma once

#include <pybind11/pybind11.h>

#include "transport.h"

namespace tsn::fabric {

// All of Properties as a dict.
pybind11::dict properties_of(const Transport& transport);

} // namespace tsn::fabric
