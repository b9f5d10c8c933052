// Reports to the simulator where threads wait. Part of platform_host.h, which includes it.
#pragma once

namespace tsn {
namespace platform {

TSN_DEVICE void wait_begins(Operation operation, int pe, const uint64_t* word, uint64_t wanted, uint32_t comparison) {
  sim::api().trace->wait_begins({operation, pe, word, int64_t(wanted), comparison});
}
TSN_DEVICE bool waits_without_a_look() { return sim::self().scheduled; }
TSN_DEVICE void wait_ends() { sim::api().trace->wait_ends(); }
TSN_DEVICE uint32_t line() { return uint32_t(sim::self().site + 1); }
TSN_DEVICE void gives_up() { sim::api().trace->gives_up(); }
TSN_DEVICE void range_begins() { sim::api().trace->range_begins(); }
TSN_DEVICE void range_ends() { sim::api().trace->range_ends(); }

} // namespace platform
} // namespace tsn
