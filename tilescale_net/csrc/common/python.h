// Shared parts of bindings: struct fields as keyword arguments and as dicts, and exceptions by name.
#pragma once

#include "tilescale_net/csrc/common/base.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace tsn {

// From here on an Error becomes the exception of this name in tilescale_net.errors, in the module that calls this.
template <class Error>
void translate(const char* name) {
  static const char* type;
  type = name;
  pybind11::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& e) {
      PyErr_SetString(pybind11::module_::import("tilescale_net.errors").attr(type).ptr(), e.what());
    }
  });
}

// TSN_NAMED values by their names.
template <class... Values>
pybind11::dict dict_of(const char* names, const Values&... values) {
  pybind11::dict d;
  ((d[next_name(&names).c_str()] = values), ...);
  return d;
}

class KeywordFields {
public:
  // `owner`: the struct's name in messages.
  explicit KeywordFields(std::string owner) : owner_(std::move(owner)) {}

  template <class... Fields>
  KeywordFields& add(const char* names, Fields&... fields) {
    ((setters_[next_name(&names)] = [&fields](pybind11::handle value) { fields = value.cast<Fields>(); }), ...);
    return *this;
  }

  // Raises TypeError that names an unknown argument, or one of a wrong type.
  void set(const pybind11::kwargs& kwargs) const {
    for (const auto& [key, value] : kwargs) {
      const auto name = key.cast<std::string>();
      const auto setter = setters_.find(name);
      if (setter == setters_.end()) throw pybind11::type_error(owner_ + " has no field '" + name + "'");
      try {
        setter->second(value);
      } catch (const pybind11::cast_error&) {
        throw pybind11::type_error(owner_ + ": " + name + " cannot be " + pybind11::repr(value).cast<std::string>());
      }
    }
  }

private:
  std::string owner_;
  std::map<std::string, std::function<void(pybind11::handle)>> setters_;
};

} // namespace tsn
