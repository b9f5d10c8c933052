#include "tilescale_net/csrc/launch/bound.h"

#include <algorithm>

namespace tsn::launch {

namespace {
constexpr Py_ssize_t kMostValues = 64;
} // namespace

Bound::Bound(PyObject* function, PyObject* first, std::vector<std::pair<int, Range>> ranges, PyObject* otherwise)
    : function_(function), first_(first), otherwise_(otherwise), ranges_(std::move(ranges)) {
  Py_INCREF(function_);
  Py_XINCREF(first_);
  Py_INCREF(otherwise_);
}

Bound::~Bound() {
  Py_DECREF(function_);
  Py_XDECREF(first_);
  Py_DECREF(otherwise_);
}

PyObject* Bound::operator()(PyObject* const* values, Py_ssize_t count) const {
  bool usual = count <= kMostValues;
  for (const auto& [place, range] : ranges_) {
    usual = usual && place < count && (PyLong_CheckExact(values[place]) || PyBool_Check(values[place]));
    if (!usual) break;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(values[place], &overflow);
    usual = overflow == 0 && range.holds(value);
  }
  if (!usual) return PyObject_Vectorcall(otherwise_, values, count, nullptr);
  if (first_ == nullptr) return PyObject_Vectorcall(function_, values, count, nullptr);
  PyObject* all[kMostValues + 1];
  all[0] = first_;
  std::copy(values, values + count, all + 1);
  return PyObject_Vectorcall(function_, all, count + 1, nullptr);
}

} // namespace tsn::launch
