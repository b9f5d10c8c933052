// Python's view of live_state.h.
#pragma once

#include <pybind11/pybind11.h>

namespace tsn {

void bind_live_state(pybind11::module_& m);

} // namespace tsn
