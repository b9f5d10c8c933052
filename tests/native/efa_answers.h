// What libfabric's efa providers answer to requests like the package's: written by tests/efa/record.sh, over the
// stand-in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

struct EfaAnswers {
  const char *library, *device, *fabric;
  bool grants_delivery_complete;
  bool wants_rx_cq_data; // it offers nothing to who is not ready for FI_RX_CQ_DATA
  uint64_t mode;
  int mr_mode;
  size_t tx_size, rx_size, inject_size, max_msg_size, cq_data_size, mr_key_size, mr_iov_limit;
  bool progress_auto, orders_sends;
  size_t link_speed; // bits a second; 0: it does not tell
  // Of an endpoint's options; what setting them returned.
  size_t max_message, max_rma, inject_message;
  bool emulated_write;
  int unsolicited_off, cuda_api_off, rnr_retry_7;
};

// clang-format off
constexpr EfaAnswers kEfaAnswers[] = {
    {"1.17", "p4d", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 8, 4, 1, 0, 1,
     100000000000, 0x0u, 0x0u, 0, 1, -92, -92, 0},
    {"1.17", "p5", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 8, 4, 1, 0, 1,
     100000000000, 0x0u, 0x0u, 0, 1, -92, -92, 0},
    {"1.17", "p5en", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 8, 4, 1, 0, 1,
     0, 0x0u, 0x0u, 0, 1, -92, -92, 0},
    {"1.17", "p6", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 8, 4, 1, 0, 1,
     0, 0x0u, 0x0u, 0, 1, -92, -92, 0},
    {"2.5", "p4d", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 4, 4, 1, 0, 0,
     100000000000, 0xffffffffffffffffu, 0xffffffffffffffffu, 8760, 1, 0, -22, 0},
    {"2.5", "p5", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 4, 4, 1, 0, 0,
     100000000000, 0xffffffffffffffffu, 0xffffffffffffffffu, 8760, 0, 0, -22, 0},
    {"2.5", "p5", "efa-direct", 1, 1, 0x110000000000000, 0x74, 4096, 8192, 32, 0x40000000u, 4, 4, 1, 0, 0,
     100000000000, 0x22e0u, 0x40000000u, 32, 0, 0, 0, 0},
    {"2.5", "p5en", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 4, 4, 1, 0, 0,
     200000000000, 0xffffffffffffffffu, 0xffffffffffffffffu, 8760, 0, 0, -22, 0},
    {"2.5", "p5en", "efa-direct", 1, 1, 0x110000000000000, 0x74, 4096, 8192, 32, 0x40000000u, 4, 4, 1, 0, 0,
     200000000000, 0x22e0u, 0x40000000u, 32, 0, 0, 0, 0},
    {"2.5", "p6", "efa", 1, 0, 0x0, 0x74, 4096, 8192, 8760, 0xffffffffffffffffu, 4, 4, 1, 0, 0,
     400000000000, 0xffffffffffffffffu, 0xffffffffffffffffu, 8760, 0, 0, -22, 0},
    {"2.5", "p6", "efa-direct", 1, 1, 0x110000000000000, 0x74, 4096, 8192, 32, 0x40000000u, 4, 4, 1, 0, 0,
     400000000000, 0x22e0u, 0x40000000u, 32, 0, 0, 0, 0},
};
// clang-format on

} // namespace
