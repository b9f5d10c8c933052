// A launch with all but some arguments known: a call only converts the others.
#pragma once

#include <Python.h>

#include <memory>
#include <vector>

#include "tilescale_net/csrc/launch/range.h"
#include "tilescale_net/csrc/launch/tensors.h"

namespace tsn::launch {

constexpr int kMostArguments = 64, kMostGiven = 32;

// An argument that a call gives.
struct Given {
  int place;                      // among the kernel's arguments
  Form form;                      // as which the kernel takes a tensor
  const View* stand_in = nullptr; // taken for None and for a tensor without elements
  Range range;                    // of an integer
};

// Made once, called from Python with the tensors and numbers that a call gives, in their order.
//
// Unusual calls go to `otherwise`, a Python function of the same arguments, which does the same more slowly and reports
// errors.
class Pack {
public:
  Pack(const Reader& reader, const TvmCalls& calls, int count, PyObject* resolve, PyObject* otherwise);
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  // An argument of every call; false for one that cannot be read. The caller keeps the object alive.
  bool fix(int place, PyObject* value);
  // `stand_in`: a tensor or null; false for one that cannot be read.
  bool give(int place, Form form, PyObject* stand_in, Range range);

  PyObject* operator()(PyObject* const* values, Py_ssize_t count);

private:
  bool set(TvmAny& argument, PyObject* value, View& view);
  bool convert(TvmAny* arguments, PyObject* const* values, View* views);
  int launch(TvmAny* arguments);

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

} // namespace tsn::launch
