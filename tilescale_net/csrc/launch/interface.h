// What this part uses of two C interfaces: DLPack's tensors and exchange functions, and TVM's calls of functions.
//
// Their authors promise that both are stable; bindings.cpp and runtime/launch_args.py refuse other versions.
#pragma once

#include <cstdint>

namespace tsn::launch {

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
constexpr uint8_t kDlMostUnsigned = 1; // codes up to it are of integers
constexpr DlDtype kInt32 = {0, 32, 1}, kUint8 = {1, 8, 1};

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

} // namespace tsn::launch
