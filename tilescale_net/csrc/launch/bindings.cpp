// Launches and looks at tensors as Python functions, without pybind11 between a call and the code that makes it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "tilescale_net/csrc/launch/bound.h"
#include "tilescale_net/csrc/launch/pack.h"

namespace py = pybind11;

namespace tsn::launch {
namespace {

template <typename T>
T* of(PyObject* capsule) {
  return (T*)PyCapsule_GetPointer(capsule, nullptr);
}

template <typename T>
PyObject* capsule(std::unique_ptr<T> made) {
  return PyCapsule_New(made.release(), nullptr, [](PyObject* self) { delete of<T>(self); });
}

PyObject* call_pack(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  return (*of<Pack>(self))(values, count);
}

// Whether a tensor is a view of torch whose values are the negatives of its memory, as the imaginary part of a
// conjugate is; of floating numbers, as others do not come about by themselves.
bool stands_for_negative(PyObject* tensor, const View& view) {
  if (view.tensor.dtype.code <= kDlMostUnsigned) return false;
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* said = PyObject_CallMethodNoArgs(tensor, name);
  if (said == nullptr) PyErr_Clear();
  Py_XDECREF(said);
  return said != Py_False;
}

struct Check {
  Reader reader;
  Wanted wanted;
};

PyObject* call_check(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  const Check& check = *of<Check>(self);
  View view;
  if (count < 1 || !check.reader.read(values[0], view) || stands_for_negative(values[0], view)) Py_RETURN_FALSE;
  const int64_t first = count > 1 ? PyLong_AsLongLong(values[1]) : -1;
  if (first == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(check.wanted.fits(view, first));
}

PyObject* call_bound(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  return (*of<Bound>(self))(values, count);
}

PyMethodDef bound_method = {"launch", (PyCFunction)(void (*)())call_bound, METH_FASTCALL, nullptr};
PyMethodDef pack_method = {"launch", (PyCFunction)(void (*)())call_pack, METH_FASTCALL, nullptr};
PyMethodDef check_method = {"fits", (PyCFunction)(void (*)())call_check, METH_FASTCALL, nullptr};

py::object function(PyMethodDef& method, PyObject* self) {
  py::object owned = py::reinterpret_steal<py::object>(self);
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, self, nullptr));
}

Reader reader_of(uintptr_t exchange, const py::type& kind) {
  const Reader reader{(const DlExchange*)exchange, (PyTypeObject*)kind.ptr()};
  if (reader.exchange->major != 1 || reader.exchange->tensor_from_object == nullptr)
    throw py::value_error("tensors are exchanged by another version of DLPack");
  return reader;
}

DlDtype dtype_of(const Reader& reader, py::handle sample) {
  View view;
  if (!reader.read(sample.ptr(), view)) throw py::value_error("a sample is no tensor that can be exchanged");
  return view.tensor.dtype;
}

} // namespace

void bind(py::module_& parent) {
  auto m = parent.def_submodule("launch", "Launches of kernels with few steps between Python and the driver.");

  // A function, its first argument or None; places, lowest and highest values of integers among the others.
  m.def("bind", [](py::object called, py::object first, const std::vector<std::tuple<int, int64_t, int64_t>>& integers,
                   py::object otherwise) {
    std::vector<std::pair<int, Range>> ranges;
    for (const auto& [place, low, high] : integers) ranges.push_back({place, {low, high}});
    PyObject* leading = first.is_none() ? nullptr : first.ptr();
    return function(bound_method,
                    capsule(std::make_unique<Bound>(called.ptr(), leading, std::move(ranges), otherwise.ptr())));
  });

  // Places and values of fixed arguments; of those that a call gives, their places, forms (shape and bits), stand-ins,
  // and lowest and highest values of integers.
  m.def("pack", [](uintptr_t exchange, const py::type& kind, std::array<uintptr_t, 4> calls,
                   const std::vector<std::pair<int, py::object>>& fixed,
                   const std::vector<std::tuple<int, std::vector<int64_t>, int, py::object, int64_t, int64_t>>& given,
                   py::object resolve, py::object otherwise) {
    if (fixed.size() + given.size() > kMostArguments || given.size() > kMostGiven)
      throw py::value_error("too many arguments");
    const TvmCalls tvm = {(decltype(TvmCalls::call))calls[0], (decltype(TvmCalls::set_stream))calls[1],
                          (decltype(TvmCalls::take_error))calls[2], (decltype(TvmCalls::release))calls[3]};
    auto made = std::make_unique<Pack>(reader_of(exchange, kind), tvm, (int)(fixed.size() + given.size()),
                                       resolve.ptr(), otherwise.ptr());
    bool readable = true;
    for (const auto& [place, value] : fixed) readable = readable && made->fix(place, value.ptr());
    for (const auto& [place, shape, bits, stand_in, low, high] : given) {
      if (shape.size() > kMostDims) throw py::value_error("a form has too many extents");
      PyObject* const tensor = stand_in.is_none() ? nullptr : stand_in.ptr();
      readable = readable && made->give(place, {shape, bits}, tensor, {low, high});
    }
    if (!readable) throw py::value_error("an argument cannot be exchanged");
    return function(pack_method, capsule(std::move(made)));
  });

  // A function of a tensor, and its first extent if that is not any: whether it is as wanted.
  m.def("check", [](uintptr_t exchange, const py::type& kind, const std::vector<py::object>& dtypes, py::object place,
                    std::vector<int64_t> shape, uint64_t alignment) {
    auto made = std::make_unique<Check>();
    made->reader = reader_of(exchange, kind);
    for (const auto& sample : dtypes) made->wanted.dtypes.push_back(dtype_of(made->reader, sample));
    View view;
    if (!made->reader.read(place.ptr(), view)) throw py::value_error("a sample is no tensor that can be exchanged");
    made->wanted.device = view.tensor.device;
    made->wanted.shape = std::move(shape);
    made->wanted.alignment = alignment;
    return function(check_method, capsule(std::move(made)));
  });
}

} // namespace tsn::launch
