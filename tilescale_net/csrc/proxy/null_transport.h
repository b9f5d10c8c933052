// A network without a network: everything that is posted completes at the next poll, and nothing arrives anywhere.
//
// It measures what the proxy itself costs. Marks are acknowledged as a peer would acknowledge them.
#pragma once

#include "tilescale_net/csrc/proxy/network.h"

namespace tsn::proxy {

std::unique_ptr<Transport> make_null_transport(const TransportOptions& options);

} // namespace tsn::proxy
