// Makes the transport that options name: libfabric's, or one of `testing` without a network; wrapped in chaos on
// request.
#include "tilescale_net/csrc/fabric/transport.h"
#include "tilescale_net/csrc/testing/chaos.h"
#include "tilescale_net/csrc/testing/null_transport.h"

namespace tsn::fabric {

// libfabric_transport.cpp; no_fabric has a version that throws, for builds without libfabric's headers.
std::unique_ptr<Transport> make_libfabric(const TransportOptions& options);

std::unique_ptr<Transport> make_transport(const TransportOptions& options) {
  if (options.provider == "null") return testing::make_null(options);
  std::unique_ptr<Transport> transport = make_libfabric(options);
  if (options.chaos.empty() || options.chaos == "off") return transport;
  return testing::make_chaos(std::move(transport), testing::parse_chaos(options.chaos), options.rank);
}

} // namespace tsn::fabric
