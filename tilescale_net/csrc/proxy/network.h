// The network's names, as this folder uses them.
#pragma once

#include "tilescale_net/csrc/fabric/transport.h"

namespace tsn::proxy {

using namespace fabric;

} // namespace tsn::proxy
