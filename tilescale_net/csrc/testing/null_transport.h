// A network without a network: everything that is posted completes at the next poll, and nothing arrives anywhere.
//
// It measures what the proxy itself costs. Marks are acknowledged as a peer would acknowledge them. Provider "null".
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::testing {

std::unique_ptr<fabric::Transport> make_null(const fabric::TransportOptions& options);

} // namespace tsn::testing
