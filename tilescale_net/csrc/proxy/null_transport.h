// A network without a network: everything that is posted completes at the next poll, and nothing arrives anywhere.
//
// It measures what the proxy itself costs. Marks are acknowledged as a peer would acknowledge them.
#pragma once

#include "tilescale_net/csrc/proxy/network.h"

namespace tsn::proxy {

std::unique_ptr<Transport> make_null_transport(const TransportOptions& options);

// The transport that the options name: provider "null" is this one.
inline std::unique_ptr<Transport> make_transport_or_null(const TransportOptions& options) {
  return options.provider == "null" ? make_null_transport(options) : make_transport(options);
}

} // namespace tsn::proxy
