#include "tilescale_net/csrc/launch/pack.h"

#include <algorithm>

namespace tsn::launch {

Pack::Pack(const Reader& reader, const TvmCalls& calls, int count, PyObject* resolve, PyObject* otherwise)
    : reader_(reader), calls_(calls), resolve_(resolve), otherwise_(otherwise), arguments_(count) {
  Py_INCREF(resolve_);
  Py_INCREF(otherwise_);
}

Pack::~Pack() {
  Py_DECREF(resolve_);
  Py_DECREF(otherwise_);
}

bool Pack::set(TvmAny& argument, PyObject* value, View& view) {
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

bool Pack::fix(int place, PyObject* value) {
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

bool Pack::give(int place, Form form, PyObject* stand_in, Range range) {
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

bool Pack::convert(TvmAny* arguments, PyObject* const* values, View* views) {
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

int Pack::launch(TvmAny* arguments) {
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

PyObject* Pack::operator()(PyObject* const* values, Py_ssize_t count) {
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
      Py_BEGIN_ALLOW_THREADS; // the driver may wait, and other threads watch over that
      failed = launch(arguments);
      Py_END_ALLOW_THREADS;
      if (failed == 0) Py_RETURN_NONE;
    }
  }
  return PyObject_Vectorcall(otherwise_, values, count, nullptr);
}

} // namespace tsn::launch
