// Launches and tensor checks as Python functions, without pybind11 in the call path.
#include "tilescale_net/csrc/common/base.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace tsn::launch {
namespace {

// The used part of two C interfaces: DLPack's tensors and exchange functions, and TVM's function calls. Their authors
// promise stability; reader_of and runtime/launch_args.py reject other versions.
struct DlDevice {
  int32_t type;
  int32_t id;
};

struct DlDtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDtype dtype;
  int64_t* shape;
  int64_t* strides; // null: contiguous
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out); // borrows; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr int32_t kDlCpu = 1;
constexpr uint8_t kDlMostUnsigned = 1; // codes up to it are integers

struct TvmAny {
  int32_t type;
  uint32_t zero;
  union {
    int64_t integer;
    double real;
    void* pointer;
  };
};

constexpr int32_t kTvmNone = 0, kTvmInt = 1, kTvmFloat = 3, kTvmTensor = 7; // the last: a pointer to a DlTensor

struct TvmCalls {
  int (*call)(void* function, TvmAny* arguments, int32_t count, TvmAny* result);
  int (*set_stream)(int32_t device_type, int32_t device_id, void* stream, void** before);
  void (*take_error)(void** error);
  int (*release)(void* object);
};

// The range of a kernel's integer parameter; TVM's host functions truncate other numbers.
struct Range {
  int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();

  bool holds(int64_t value) const { return low <= value && value <= high; }
};

// --- torch tensors as C sees them, without a copy or an allocation ---------------------------------------------------

constexpr int kMostDims = 6;

// The form in which a kernel takes a tensor.
struct Form {
  std::vector<int64_t> shape;   // at most one extent is -1: the rest; empty: unchanged
  std::optional<DlDtype> dtype; // none: the tensor's own
  bool turned = false;          // the shape of the tensor with its last two axes exchanged
};

// A view of a tensor, and room for extents that are not the tensor's own.
struct View {
  DlTensor tensor;
  std::array<int64_t, kMostDims> shape, strides;

  bool contiguous() const {
    if (tensor.strides == nullptr) return true;
    int64_t run = 1;
    bool dense = true;
    for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
      if (tensor.shape[i] == 0) return true; // with any strides
      dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == run);
      run *= tensor.shape[i];
    }
    return dense;
  }
  int64_t elements() const {
    int64_t count = 1;
    for (int32_t i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
    return count;
  }
  // Exchange the last two axes; false without two axes, or without strides.
  bool turn() {
    if (tensor.ndim < 2 || tensor.strides == nullptr) return false;
    keep();
    std::swap(shape[tensor.ndim - 1], shape[tensor.ndim - 2]);
    std::swap(strides[tensor.ndim - 1], strides[tensor.ndim - 2]);
    return true;
  }
  // View it in another form; false if it is not contiguous or does not divide.
  bool reshape(const Form& form) {
    if (form.turned && !turn()) return false;
    const int64_t bits = elements() * tensor.dtype.bits * tensor.dtype.lanes;
    const int64_t count = form.dtype ? bits / (form.dtype->bits * form.dtype->lanes) : elements();
    int64_t known = 1;
    for (int64_t extent : form.shape) known *= extent < 0 ? 1 : extent;
    if (!contiguous() || known == 0 || count % known != 0) return false;
    bool whole = count == known;
    int64_t run = 1;
    for (int i = (int)form.shape.size() - 1; i >= 0; --i) {
      whole = whole || form.shape[i] < 0;
      shape[i] = form.shape[i] < 0 ? count / known : form.shape[i];
      strides[i] = run;
      run *= shape[i];
    }
    if (!whole) return false;
    tensor.ndim = (int32_t)form.shape.size();
    if (form.dtype) tensor.dtype = *form.dtype;
    tensor.shape = shape.data();
    tensor.strides = strides.data(); // kernels' host functions expect none for strides of 1
    return true;
  }
  // Own the extents, so that they outlive the object.
  void keep() {
    std::memcpy(shape.data(), tensor.shape, tensor.ndim * sizeof(int64_t));
    tensor.shape = shape.data();
    if (tensor.strides != nullptr) {
      std::memcpy(strides.data(), tensor.strides, tensor.ndim * sizeof(int64_t));
      tensor.strides = strides.data();
    }
  }
};

// Reader of tensors of `kind` (torch.Tensor).
struct Reader {
  const DlExchange* exchange;
  PyTypeObject* kind;

  // False if `object` is no such tensor or cannot be exchanged, without a Python error. Valid as long as the object.
  bool read(PyObject* object, View& view) const {
    if (Py_TYPE(object) != kind) return false;
    if (exchange->tensor_from_object(object, &view.tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    return view.tensor.ndim <= kMostDims;
  }
};

// Requirements of a tensor.
struct Wanted {
  std::vector<DlDtype> dtypes;
  DlDevice device;
  std::vector<int64_t> shape; // -1: any extent
  uint64_t alignment;

  // `first`: the first extent, if 0 or more.
  bool fits(const View& view, int64_t first) const {
    const DlTensor& t = view.tensor;
    if (t.device.type != device.type || t.device.id != device.id || t.ndim != (int32_t)shape.size()) return false;
    bool known = false;
    for (const DlDtype& d : dtypes) known = known || std::memcmp(&d, &t.dtype, sizeof d) == 0;
    if (!known) return false;
    for (int32_t i = 0; i < t.ndim; ++i) {
      const int64_t extent = i == 0 && first >= 0 ? first : shape[i];
      if (extent >= 0 && t.shape[i] != extent) return false;
    }
    return view.contiguous() && ((uint64_t)t.data + t.byte_offset) % alignment == 0;
  }
};

// --- a launch with constant arguments: a call only converts the others ----------------------------------------------

constexpr int kMostArguments = 64, kMostGiven = 32;

int64_t slow_calls = 0; // launchable from here except for an unreadable or unfit argument

// An argument of each call.
struct Given {
  int place;                      // among the kernel's arguments
  Form form;                      // the kernel's form of a tensor
  const View* stand_in = nullptr; // replaces None and empty tensors
  Range range;                    // of an integer
};

// Made once, called from Python with a call's tensors and numbers, in order.
//
// Unusual calls go to `otherwise`, a Python function of the same arguments, which is slower and reports errors.
class Pack {
public:
  Pack(const Reader& reader, const TvmCalls& calls, int count, PyObject* resolve, PyObject* otherwise)
      : reader_(reader), calls_(calls), resolve_(resolve), otherwise_(otherwise), arguments_(count) {
    Py_INCREF(resolve_);
    Py_INCREF(otherwise_);
  }
  ~Pack() {
    Py_DECREF(resolve_);
    Py_DECREF(otherwise_);
  }
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  // A constant argument; false if unreadable. The caller keeps the object alive.
  bool fix(int place, PyObject* value) {
    auto view = std::make_unique<View>();
    if (!set(arguments_[place], value, *view)) return false;
    if (arguments_[place].type == kTvmTensor) {
      view->keep();
      device_ = view->tensor.device;
      on_gpu_ = device_.type != kDlCpu;
      kept_.push_back(std::move(view));
    }
    return true;
  }
  // `stand_in`: a tensor or null; false if unreadable.
  bool give(int place, Form form, PyObject* stand_in, Range range) {
    Given given;
    given.place = place;
    given.form = std::move(form);
    given.range = range;
    if (stand_in != nullptr) {
      auto view = std::make_unique<View>();
      if (!reader_.read(stand_in, *view)) return false;
      view->keep();
      given.stand_in = view.get();
      kept_.push_back(std::move(view));
    }
    given_.push_back(std::move(given));
    return true;
  }

  PyObject* operator()(PyObject* const* values, Py_ssize_t count) {
    if (!resolved_) {
      PyObject* found = PyObject_CallNoArgs(resolve_);
      if (found == nullptr) return nullptr;
      function_ = PyLong_AsVoidPtr(found);
      Py_DECREF(found);
      if (PyErr_Occurred() != nullptr) return nullptr;
      resolved_ = true;
    }
    if (function_ != nullptr && (size_t)count == given_.size()) {
      TvmAny arguments[kMostArguments];
      View views[kMostGiven];
      std::copy(arguments_.begin(), arguments_.end(), arguments);
      if (convert(arguments, values, views)) {
        int failed;
        Py_BEGIN_ALLOW_THREADS; // the driver may wait, and other threads watch for hangs
        failed = launch(arguments);
        Py_END_ALLOW_THREADS;
        if (failed == 0) Py_RETURN_NONE;
      }
      ++slow_calls;
    }
    return PyObject_Vectorcall(otherwise_, values, count, nullptr);
  }

private:
  bool set(TvmAny& argument, PyObject* value, View& view) {
    argument.zero = 0;
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      argument.type = kTvmInt;
      argument.integer = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0;
    }
    if (PyFloat_CheckExact(value)) {
      argument.type = kTvmFloat;
      argument.real = PyFloat_AS_DOUBLE(value);
      return true;
    }
    if (!reader_.read(value, view)) return false;
    argument.type = kTvmTensor;
    argument.pointer = &view.tensor;
    return true;
  }
  bool convert(TvmAny* arguments, PyObject* const* values, View* views) {
    for (size_t i = 0; i < given_.size(); ++i) {
      const Given& given = given_[i];
      TvmAny& argument = arguments[given.place];
      bool missing = values[i] == Py_None;
      if (!missing) {
        if (!set(argument, values[i], views[i])) return false;
        if (argument.type == kTvmInt && !given.range.holds(argument.integer)) return false;
        if (argument.type != kTvmTensor) continue;
        missing = given.stand_in != nullptr && views[i].elements() == 0;
      }
      if (missing) {
        if (given.stand_in == nullptr) return false;
        argument.type = kTvmTensor;
        argument.pointer = const_cast<DlTensor*>(&given.stand_in->tensor);
      } else if (!given.form.shape.empty() && !views[i].reshape(given.form)) {
        return false;
      }
    }
    return true;
  }
  int launch(TvmAny* arguments) {
    void *stream = nullptr, *before = nullptr;
    if (on_gpu_ && (reader_.exchange->current_stream(device_.type, device_.id, &stream) != 0 ||
                    calls_.set_stream(device_.type, device_.id, stream, &before) != 0))
      return -1;
    TvmAny result{};
    const int failed = calls_.call(function_, arguments, (int32_t)arguments_.size(), &result);
    if (failed != 0) {
      void* error = nullptr;
      calls_.take_error(&error);
      if (error != nullptr) calls_.release(error);
    }
    if (on_gpu_ && before != stream) calls_.set_stream(device_.type, device_.id, before, nullptr);
    return failed;
  }

  const Reader reader_;
  const TvmCalls calls_;
  PyObject *resolve_, *otherwise_; // owned
  void* function_ = nullptr;
  bool resolved_ = false;
  bool on_gpu_ = false;
  DlDevice device_ = {kDlCpu, 0};
  std::vector<TvmAny> arguments_;
  std::vector<Given> given_;
  std::vector<std::unique_ptr<View>> kept_;
};

// --- a function with a constant first argument and limits of its integers -------------------------------------------

constexpr Py_ssize_t kMostValues = 64;

// Called from Python with the other arguments. Calls with an integer out of range, or with another type there, go to
// `otherwise`, which takes the same arguments.
class Bound {
public:
  // `first`: an object or null.
  Bound(PyObject* function, PyObject* first, std::vector<std::pair<int, Range>> ranges, PyObject* otherwise)
      : function_(function), first_(first), otherwise_(otherwise), ranges_(std::move(ranges)) {
    Py_INCREF(function_);
    Py_XINCREF(first_);
    Py_INCREF(otherwise_);
  }
  ~Bound() {
    Py_DECREF(function_);
    Py_XDECREF(first_);
    Py_DECREF(otherwise_);
  }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  PyObject* operator()(PyObject* const* values, Py_ssize_t count) const {
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

private:
  PyObject *function_, *first_, *otherwise_; // owned
  std::vector<std::pair<int, Range>> ranges_;
};

// --- the Python functions --------------------------------------------------------------------------------------------

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

// Whether a tensor is a torch view whose values are the negatives of its memory, as the imaginary part of a
// conjugate; only floating ones arise implicitly.
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

// Tensors of one call, all with the rows of the first.
struct Usual {
  Reader reader;
  std::vector<Wanted> wanted;
  int64_t most; // rows
};

PyObject* call_usual(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  const Usual& usual = *of<Usual>(self);
  int64_t rows = -1;
  bool fits = count == (Py_ssize_t)usual.wanted.size();
  for (Py_ssize_t i = 0; fits && i < count; ++i) {
    View view;
    if (i > 0 && values[i] == Py_None) continue;
    fits =
        usual.reader.read(values[i], view) && usual.wanted[i].fits(view, rows) && !stands_for_negative(values[i], view);
    if (i == 0 && fits) rows = view.tensor.shape[0];
  }
  return PyLong_FromLongLong(fits && rows <= usual.most ? rows : -1);
}

// Words that are 0 until an event. Python's lock prevents other threads from unmapping them during the read.
struct Words {
  std::vector<uintptr_t> addresses;
};

PyObject* call_words(PyObject* self, PyObject* const*, Py_ssize_t) {
  for (uintptr_t address : of<Words>(self)->addresses)
    if (*(const volatile uint32_t*)address != 0) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyObject* call_bound(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  return (*of<Bound>(self))(values, count);
}

PyMethodDef bound_method = {"launch", (PyCFunction)(void (*)())call_bound, METH_FASTCALL, nullptr};
PyMethodDef pack_method = {"launch", (PyCFunction)(void (*)())call_pack, METH_FASTCALL, nullptr};
PyMethodDef usual_method = {"rows", (PyCFunction)(void (*)())call_usual, METH_FASTCALL, nullptr};
PyMethodDef words_method = {"any_set", (PyCFunction)(void (*)())call_words, METH_FASTCALL, nullptr};
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

// Sample tensors of the dtypes, extents and alignment, see launch_args.tensor_check.
using Description = std::tuple<std::vector<py::object>, std::vector<int64_t>, uint64_t>;

// `place`: a tensor on the device.
Wanted wanted_of(const Reader& reader, const Description& description, py::handle place) {
  View view;
  if (!reader.read(place.ptr(), view)) throw py::value_error("a sample is no tensor that can be exchanged");
  const auto& [samples, shape, alignment] = description;
  Wanted wanted{{}, view.tensor.device, shape, alignment};
  for (const auto& sample : samples) wanted.dtypes.push_back(dtype_of(reader, sample));
  return wanted;
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

  // Positions and values of constant arguments; of a call's arguments their positions, forms (shape, and a tensor of
  // the dtype or None), placeholders, whether they are turned, and lowest and highest values of integers.
  m.def("pack",
        [](uintptr_t exchange, const py::type& kind, std::array<uintptr_t, 4> calls,
           const std::vector<std::pair<int, py::object>>& fixed,
           const std::vector<std::tuple<int, std::vector<int64_t>, py::object, py::object, bool, int64_t, int64_t>>&
               given,
           py::object resolve, py::object otherwise) {
          if (fixed.size() + given.size() > kMostArguments || given.size() > kMostGiven)
            throw py::value_error("too many arguments");
          const TvmCalls tvm = {(decltype(TvmCalls::call))calls[0], (decltype(TvmCalls::set_stream))calls[1],
                                (decltype(TvmCalls::take_error))calls[2], (decltype(TvmCalls::release))calls[3]};
          const Reader reader = reader_of(exchange, kind);
          auto made =
              std::make_unique<Pack>(reader, tvm, (int)(fixed.size() + given.size()), resolve.ptr(), otherwise.ptr());
          bool readable = true;
          for (const auto& [place, value] : fixed) readable = readable && made->fix(place, value.ptr());
          for (const auto& [place, shape, sample, stand_in, turned, low, high] : given) {
            if (shape.size() > kMostDims) throw py::value_error("a form has too many extents");
            PyObject* const tensor = stand_in.is_none() ? nullptr : stand_in.ptr();
            std::optional<DlDtype> dtype;
            if (!sample.is_none()) dtype = dtype_of(reader, sample);
            readable = readable && made->give(place, {shape, dtype, turned}, tensor, {low, high});
          }
          if (!readable) throw py::value_error("an argument cannot be exchanged");
          return function(pack_method, capsule(std::move(made)));
        });

  m.def("slow_calls", [] { return slow_calls; });

  // A function of a tensor, and its first extent unless any: whether it is as wanted.
  m.def("check", [](uintptr_t exchange, const py::type& kind, py::object place, const Description& wanted) {
    const Reader reader = reader_of(exchange, kind);
    return function(check_method, capsule(std::make_unique<Check>(Check{reader, wanted_of(reader, wanted, place)})));
  });

  // A function of tensors that are all as wanted and have equally many rows, of which all but the first may be None:
  // the number of rows; -1 for other tensors, and for more rows than `most`.
  m.def("rows", [](uintptr_t exchange, const py::type& kind, py::object place, const std::vector<Description>& wanted,
                   int64_t most) {
    auto made = std::make_unique<Usual>(Usual{reader_of(exchange, kind), {}, most});
    for (const auto& each : wanted) made->wanted.push_back(wanted_of(made->reader, each, place));
    return function(usual_method, capsule(std::move(made)));
  });

  // Two functions: whether a word of 4 bytes at one of some addresses is not 0; and one that takes these addresses.
  m.def("words", [] {
    auto made = std::make_unique<Words>();
    Words* const words = made.get();
    py::object any_set = function(words_method, capsule(std::move(made)));
    py::object watch = py::cpp_function(
        [words, any_set](std::vector<uintptr_t> addresses) { words->addresses = std::move(addresses); });
    return std::make_pair(any_set, watch);
  });
}

} // namespace tsn::launch
