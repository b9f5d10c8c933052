// What the proxy reports when it gives up; runtime/proxy.py turns it into an exception.
#pragma once

#include "tilescale_net/device/descriptor.h"

#include <cstdint>
#include <string>

namespace tsn::proxy {

struct Failure {
  std::string kind;      // class of tilescale_net/errors.py: InvalidDescriptor, PeerLost, FabricError
  std::string text;      // the whole message
  int pe = -1;           // the PE concerned, or -1
  std::string operation; // "put", …, or ""
  uint64_t offset = 0;   // heap offset concerned, or 0
};

inline const char* name_of(Command c) {
  if (is_value_signal(c)) return (uint32_t)c < kCommandCount ? "put_signal" : "unknown operation";
  static const char* const names[] = {"nothing",   "put",       "put_signal", "put_signal", "get",   "signal", "signal",
                                      "put_value", "put_value", "put_value",  "put_value",  "fence", "flush",  "flush"};
  return names[(uint32_t)c];
}

} // namespace tsn::proxy
