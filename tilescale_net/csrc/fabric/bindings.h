// Parts of the fabric's bindings for other folders.
#pragma once

#include <pybind11/pybind11.h>

#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::fabric {

// All of Properties as a dict.
inline pybind11::dict properties_of(const Properties& p) {
  return dict_of(TSN_NAMED(p.provider, p.version, p.library, p.interface, p.rails, p.max_write, p.max_send,
                           p.max_message, p.inject_bytes, p.depth, p.link_gbps, p.imm_bits, p.immediates,
                           p.device_memory, p.delivery_complete, p.ordered_messages, p.emulated_write,
                           p.remote_progress, p.doorbells));
}

// Raises ValueError with the argument's name.
inline Memory::Kind memory_kind(const char* argument, const std::string& kind) {
  if (kind == "cuda") return Memory::cuda;
  if (kind == "host") return Memory::host;
  throw pybind11::value_error(concat(argument, " is 'host' or 'cuda', not '", kind, "'"));
}

// Bindings compiled against libfabric's headers; without them, functions that raise ConfigurationError.
void bind_libfabric(pybind11::module_& m);

} // namespace tsn::fabric
