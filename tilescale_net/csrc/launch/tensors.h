// Torch tensors as C sees them, without a copy or an allocation.
#pragma once

#include <Python.h>

#include <array>
#include <vector>

#include "tilescale_net/csrc/launch/interface.h"

namespace tsn::launch {

constexpr int kMostDims = 6;

// As which a kernel takes a tensor.
struct Form {
  std::vector<int64_t> shape; // at most one extent is -1: what remains; empty: as it is
  int bits = 0;               // 8: as uint8, 32: as int32; 0: of its own element type
};

// A view of a tensor, and room for extents that are not the tensor's own.
struct View {
  DlTensor tensor;
  std::array<int64_t, kMostDims> shape, strides;

  bool contiguous() const;
  int64_t elements() const;
  // See it in another form; false for one that is not contiguous or does not divide.
  bool reshape(const Form& form);
  // Own the extents, so that they outlive the object.
  void keep();
};

// How tensors of `kind` (torch.Tensor) are looked at.
struct Reader {
  const DlExchange* exchange;
  PyTypeObject* kind;

  // False where `object` is no such tensor or cannot be exchanged; no Python error is left. Valid while the object is.
  bool read(PyObject* object, View& view) const;
};

// What a tensor must be like.
struct Wanted {
  std::vector<DlDtype> dtypes;
  DlDevice device;
  std::vector<int64_t> shape; // -1: any extent
  uint64_t alignment;

  // `first`: the first extent, where it is 0 or more.
  bool fits(const View& view, int64_t first) const;
};

} // namespace tsn::launch
