// A kernel argument with its size in bytes: accesses through it are checked.
#pragma once

#include <cstdio>
#include <string>

#include "builtins.h"

namespace tsn {
namespace sim {

template <typename T>
class Checked;

// Result of `A + i`: an address that is checked when converted to a pointer for an access.
template <typename T>
class CheckedAddress {
public:
  CheckedAddress(const Checked<T>& owner, int64_t index) : owner_(owner), index_(index) {}
  CheckedAddress operator+(int64_t n) const { return {owner_, index_ + n}; }
  CheckedAddress operator-(int64_t n) const { return {owner_, index_ - n}; }
  // Generated code casts constness away together with the type.
  template <typename U, typename = std::enable_if_t<!std::is_void<U>::value>>
  operator U*() const {
    return (U*)owner_.loaded(index_, sizeof(U));
  }
  operator void*() const { return (void*)(owner_.unchecked() + index_); }
  T& operator*() const { return *owner_.loaded(index_, sizeof(T)); }
  T& operator[](int64_t i) const { return *owner_.loaded(index_ + i, sizeof(T)); }

private:
  Checked<T> owner_;
  int64_t index_;
};

template <typename T>
class Checked {
public:
  Checked(const char* name, uint64_t pointer, uint64_t bytes)
      : pointer_(reinterpret_cast<T*>(pointer)), bytes_(bytes), name_(name) {}

  T& operator[](int64_t i) const { return *loaded(i, sizeof(T)); }
  CheckedAddress<T> operator+(int64_t i) const { return {*this, i}; }
  // The same for the left side of an assignment.
  T& stored(int64_t i) const {
    note_store(checked(i, sizeof(T)), sizeof(T), name_, pointer_);
    return pointer_[i];
  }
  template <typename U>
  U& stored_as(int64_t i) const {
    note_store(checked(i, sizeof(U)), sizeof(U), name_, pointer_);
    return *(U*)(pointer_ + i);
  }
  // The address of element i for a primitive, by its name, that moves `bytes` from there on.
  T* span(int64_t i, int64_t bytes, const char* primitive) const {
    if (bytes > 0 && !holds(i, static_cast<uint64_t>(bytes))) {
      char where[160];
      snprintf(where, sizeof where, "%s: %s", primitive, name_);
      api().out_of_bounds(where, i * static_cast<int64_t>(sizeof(T)), static_cast<uint64_t>(bytes), bytes_);
    }
    return pointer_ + i;
  }
  T& operator*() const { return *loaded(0, sizeof(T)); }
  // Bytes from element i to the end of the tensor.
  uint64_t rest(int64_t i) const {
    const uint64_t offset = static_cast<uint64_t>(i) * sizeof(T);
    return offset < bytes_ ? bytes_ - offset : 0;
  }
  // Argument of an atomic function, which reports its access itself.
  struct Atomically {
    const Checked& owner;
    T& operator[](int64_t i) const { return *owner.checked(i, sizeof(T)); }
  };
  Atomically atomically() const { return {*this}; }
  // Taking an address or passing the tensor is no access.
  T* unchecked() const { return pointer_; }
  operator T*() const { return pointer_; }
  template <typename U>
  explicit operator U*() const {
    return (U*)pointer_;
  }

  T* checked(int64_t i, uint64_t bytes) const {
    if (__builtin_expect(!holds(i, bytes), 0))
      api().out_of_bounds(name_, i * static_cast<int64_t>(sizeof(T)), bytes, bytes_);
    return pointer_ + i;
  }

  // The same for an access that is not the left side of an assignment.
  T* loaded(int64_t i, uint64_t bytes) const {
    note_load(checked(i, bytes), bytes, name_, pointer_);
    return pointer_ + i;
  }

private:
  bool holds(int64_t i, uint64_t bytes) const {
    return bytes <= bytes_ && static_cast<uint64_t>(i) * sizeof(T) <= bytes_ - bytes;
  }

  T* pointer_;
  uint64_t bytes_;
  const char* name_;
};

// Shared memory, from a variable's first byte on, as elements of a type. Whether an index is inside is checked
// elsewhere (compiler/simulator/bounds.py).
template <typename T>
class Shared {
public:
  Shared(const char* name, void* pointer) : pointer_(static_cast<T*>(pointer)), name_(name) {}

  __attribute__((always_inline)) T& operator[](int64_t i) const { return *loaded(i, sizeof(T)); }
  __attribute__((always_inline)) T& operator*() const { return *loaded(0, sizeof(T)); }
  __attribute__((always_inline)) T& stored(int64_t i) const {
    note_local(pointer_ + i, sizeof(T), LocalAccess::store, name_, pointer_);
    return pointer_[i];
  }
  template <typename U>
  __attribute__((always_inline)) U& stored_as(int64_t i) const {
    note_local(pointer_ + i, sizeof(U), LocalAccess::store, name_, pointer_);
    return *(U*)(pointer_ + i);
  }
  __attribute__((always_inline)) T* loaded(int64_t i, uint64_t bytes) const {
    note_local(pointer_ + i, bytes, LocalAccess::load, name_, pointer_);
    return pointer_ + i;
  }
  T* unchecked() const { return pointer_; }
  T* atomically() const { return pointer_; }
  operator T*() const { return pointer_; }
  template <typename U>
  explicit operator U*() const {
    return (U*)pointer_;
  }

  // Result of `A + i`: an address whose conversion to a pointer is an access.
  class Address {
  public:
    __attribute__((always_inline)) Address(const Shared& owner, int64_t index) : owner_(owner), index_(index) {}
    __attribute__((always_inline)) Address operator+(int64_t n) const { return {owner_, index_ + n}; }
    template <typename U, typename = std::enable_if_t<!std::is_void<U>::value>>
    __attribute__((always_inline)) operator U*() const {
      return (U*)owner_.loaded(index_, sizeof(U));
    }
    operator void*() const { return (void*)(owner_.pointer_ + index_); }
    __attribute__((always_inline)) T& operator*() const { return owner_[index_]; }
    __attribute__((always_inline)) T& operator[](int64_t i) const { return owner_[index_ + i]; }

  private:
    Shared owner_;
    int64_t index_;
  };
  __attribute__((always_inline)) Address operator+(int64_t i) const { return {*this, i}; }

private:
  T* pointer_;
  const char* name_;
};

// A variable in shared memory; the generated code states its element type at each access.
class SharedBytes {
public:
  SharedBytes(const char* name, void* pointer) : name_(name), pointer_(pointer) {}
  template <typename T>
  __attribute__((always_inline)) Shared<T> as() const {
    return Shared<T>(name_, pointer_);
  }
  operator void*() const { return pointer_; }
  template <typename U>
  explicit operator U*() const {
    return (U*)pointer_;
  }

private:
  const char* name_;
  void* pointer_;
};

// A peer's counterpart of a tensor, as tsn::remote returns it, with the tensor's bounds.
class View {
public:
  View(const char* name, void* pointer, uint64_t bytes) : name_(name), pointer_(pointer), bytes_(bytes) {}
  template <typename T>
  Checked<T> as() const {
    return Checked<T>(name_, reinterpret_cast<uint64_t>(pointer_), bytes_);
  }
  operator void*() const { return pointer_; }

private:
  const char* name_;
  void* pointer_;
  uint64_t bytes_;
};

} // namespace sim
} // namespace tsn

// For compiler/simulator/bounds.py: `value`, a size of a copy. If its condition is false the launch ends with `text`,
// with numbers in place of {}.
inline int64_t tsn_agreed(int64_t value, bool holds, const char* text, int64_t left, int64_t right) {
  if (__builtin_expect(holds, 1)) return value;
  std::string message = text;
  for (const int64_t number : {left, right}) message.replace(message.find("{}"), 2, std::to_string(number));
  tsn::sim::api().trap(message.c_str());
  return 0;
}

// For compiler/simulator/bounds.py: the condition of an access whose index is outside of its axis. Does not return.
inline bool tsn_report_index(const char* name, int axis, int64_t index, int64_t extent) {
  tsn::sim::api().index_outside(name, axis, index, extent);
  return false;
}
