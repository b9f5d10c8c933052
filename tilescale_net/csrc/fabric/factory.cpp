#include <cstdlib>

#include "chaos.h"
#include "libfabric_transport.h"

namespace tsn::fabric {

std::unique_ptr<Transport> make_transport(const TransportOptions& options) {
  std::unique_ptr<Transport> transport = std::make_unique<LibfabricTransport>(options);
  const char* environment = std::getenv("TSN_CHAOS");
  const std::string chaos = options.chaos.empty() && environment ? environment : options.chaos;
  if (chaos.empty() || chaos == "off") return transport;
  return make_chaos(std::move(transport), parse_chaos(chaos), options.rank);
}

} // namespace tsn::fabric
