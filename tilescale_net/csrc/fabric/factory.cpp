#include "chaos.h"
#include "libfabric_transport.h"

namespace tsn::fabric {

std::unique_ptr<Transport> make_transport(const TransportOptions& options) {
  std::unique_ptr<Transport> transport = std::make_unique<LibfabricTransport>(options);
  if (options.chaos.empty() || options.chaos == "off") return transport;
  return make_chaos(std::move(transport), parse_chaos(options.chaos), options.rank);
}

} // namespace tsn::fabric
