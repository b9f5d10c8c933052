#include "tilescale_net/csrc/launch/tensors.h"

#include <cstring>

namespace tsn::launch {

bool View::contiguous() const {
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

int64_t View::elements() const {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  return count;
}

bool View::as_rows(int64_t columns, bool words) {
  const int64_t bits = tensor.dtype.bits * tensor.dtype.lanes;
  const int64_t count = words ? elements() * bits / 32 : elements();
  if (!contiguous() || count % columns != 0) return false;
  shape[0] = count / columns;
  shape[1] = strides[0] = columns;
  strides[1] = 1;
  tensor.ndim = 2;
  if (words) tensor.dtype = kInt32;
  tensor.shape = shape.data();
  tensor.strides = strides.data(); // kernels' host functions take none for strides of 1
  return true;
}

void View::keep() {
  std::memcpy(shape.data(), tensor.shape, tensor.ndim * sizeof(int64_t));
  tensor.shape = shape.data();
  if (tensor.strides != nullptr) {
    std::memcpy(strides.data(), tensor.strides, tensor.ndim * sizeof(int64_t));
    tensor.strides = strides.data();
  }
}

bool Reader::read(PyObject* object, View& view) const {
  if (Py_TYPE(object) != kind) return false;
  if (exchange->tensor_from_object(object, &view.tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  return view.tensor.ndim <= kMostDims;
}

bool Wanted::fits(const View& view, int64_t first) const {
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

} // namespace tsn::launch
