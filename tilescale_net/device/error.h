// How a kernel gives up: one record for the host, one word that ends every wait. Nothing traps: a trap would destroy
// the CUDA context, and with it the evidence.
#pragma once

#include "platform.h"

namespace tsn {

// Whether this PE gave up; a cheap read of a copy in device memory. After that no put and no signal is sent.
TSN_DEVICE bool aborted(const Context* ctx) { return platform::load_recent(&ctx->aborted) != 0; }

// Makes the abort visible to every block of this PE.
TSN_DEVICE void set_aborted(const Context* ctx) {
  platform::store<Order::relaxed, MemScope::sys>(const_cast<uint64_t*>(&ctx->aborted), uint64_t(1));
}

// Records an error, unless there is one already, and sets the abort word. The first writer claims the record; `kind`
// comes last, so a reader that sees it sees the whole record. `comparison` is 1 + Compare of a wait, else 0.
TSN_COLD void fail(const Context* ctx, ErrorKind kind, Operation operation, int pe, const void* address,
                   uint64_t expected, uint64_t observed, uint64_t bytes, uint32_t comparison = 0) {
  if constexpr (platform::kDefersRemoteWrites) platform::gives_up();
  ErrorRecord* r = reinterpret_cast<ErrorRecord*>(platform::load_constant(&ctx->error));
  if (platform::atomic_cas<Order::relaxed, MemScope::sys>(&r->claimed, uint64_t(0), uint64_t(1)) == 0) {
    r->pe = pe;
    r->operation = operation;
    r->block = platform::block_index();
    r->address = reinterpret_cast<uint64_t>(address);
    r->expected = expected;
    r->observed = observed;
    r->bytes = bytes;
    r->comparison = comparison;
    if constexpr (platform::kDefersRemoteWrites) r->line = platform::line();
    platform::store<Order::release, MemScope::sys>(&r->kind, uint32_t(kind));
  }
  uint32_t* word = reinterpret_cast<uint32_t*>(platform::load_constant(&ctx->abort_word));
  platform::store<Order::release, MemScope::sys>(word, uint32_t(1));
  set_aborted(ctx);
}

} // namespace tsn
