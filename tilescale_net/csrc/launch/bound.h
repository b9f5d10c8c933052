// A function with its first argument known, and limits of the integers that it takes.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "tilescale_net/csrc/launch/range.h"

namespace tsn::launch {

// Called from Python with the other arguments. Calls with an integer beyond its range, or with something else than an
// int there, go to `otherwise`, which takes the same arguments.
class Bound {
public:
  // `first`: an object or null.
  Bound(PyObject* function, PyObject* first, std::vector<std::pair<int, Range>> ranges, PyObject* otherwise);
  ~Bound();
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  PyObject* operator()(PyObject* const* values, Py_ssize_t count) const;

private:
  PyObject *function_, *first_, *otherwise_; // owned
  std::vector<std::pair<int, Range>> ranges_;
};

} // namespace tsn::launch
