// The network's names, as this folder uses them.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::bench {

using namespace fabric;

} // namespace tsn::bench
