// A transport without a network: every operation completes at the next poll, and nothing arrives.
//
// It measures the proxy's own cost. Marks are acknowledged as by a peer. Provider "null".
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::testing {

std::unique_ptr<fabric::Transport> make_null(const fabric::TransportOptions& options);

} // namespace tsn::testing
