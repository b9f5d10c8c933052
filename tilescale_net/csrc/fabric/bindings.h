// Parts of the fabric's bindings for other folders.
#pragma once

#include <pybind11/pybind11.h>

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::fabric {

// All of Properties as a dict.
inline pybind11::dict properties_of(const Properties& p) {
  pybind11::dict d;
  d["provider"] = p.provider;
  d["version"] = p.version;
  d["library"] = p.library;
  d["interface"] = p.interface;
  d["rails"] = p.rails;
  d["max_write"] = p.max_write;
  d["max_send"] = p.max_send;
  d["max_message"] = p.max_message;
  d["inject_bytes"] = p.inject_bytes;
  d["depth"] = p.depth;
  d["link_gbps"] = p.link_gbps;
  d["imm_bits"] = p.imm_bits;
  d["immediates"] = p.immediates;
  d["device_memory"] = p.device_memory;
  d["delivery_complete"] = p.delivery_complete;
  d["ordered_messages"] = p.ordered_messages;
  d["emulated_write"] = p.emulated_write;
  d["remote_progress"] = p.remote_progress;
  d["doorbells"] = p.doorbells;
  return d;
}

// Bindings compiled against libfabric's headers; without them, functions that raise ConfigurationError.
void bind_libfabric(pybind11::module_& m);

} // namespace tsn::fabric
