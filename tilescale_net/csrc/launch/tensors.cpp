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

bool View::reshape(const Form& form) {
  const int64_t bits = elements() * tensor.dtype.bits * tensor.dtype.lanes;
  const int64_t count = form.bits != 0 ? bits / form.bits : elements();
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
  if (form.bits != 0) tensor.dtype = form.bits == 8 ? kUint8 : kInt32;
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
