#pragma once

#include <pybind11/pybind11.h>

namespace tsn {

void bind_explorer(pybind11::module_& m);

} // namespace tsn
