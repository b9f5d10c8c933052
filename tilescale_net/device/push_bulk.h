// Pushes in bulk, from the first byte to the last, by the leader of a block alone.
#pragma once

#include "address.h"
#include "copy.h"

namespace tsn {

// Whether a push goes in bulk. (Not one that is whole in its beginning: threads that take all of it at once need no
// ring.)
template <Engine E, int Unroll, int Stages, int StageBytes, class B>
TSN_DEVICE bool goes_in_bulk(const B& begin, const void* dst, const void* src, int64_t bytes) {
  return !begin.whole && bulk_by_size<E, Unroll, Stages, StageBytes>(Direction::push, uint64_t(bytes), 0) &&
         (reinterpret_cast<uint64_t>(dst) ^ reinterpret_cast<uint64_t>(src)) % 16 == 0;
}

constexpr uint64_t kNotPushed = ~uint64_t(0);

// Copies `bytes` to where `dst` lies on the PE, whose heap lies that far from this one's: what is returned. kNotPushed:
// Route::open() said no, and nothing was written. With a signal word, that is checked too.
//
// Out of line, because what a kernel's small messages wait for should stay in few registers and close together.
template <int Stages, int StageBytes>
TSN_COLD uint64_t push_bulk(const Context* ctx, Operation operation, void* dst, const void* src, int64_t bytes, int pe,
                            const uint64_t* sig, void* ring) {
  const detail::Cut cut((char*)dst, (const char*)src, uint64_t(bytes));
  BulkCopy<Stages, StageBytes> copy((const char*)src + cut.head, cut.body, (char*)ring);
  const Route route(ctx, pe); // its loads come before the copy's: all are on their way together
  copy.begin();
  const bool open = sig == nullptr ? route.open<Scope::thread>(operation, dst, bytes)
                                   : route.open<Scope::thread>(operation, dst, bytes, sig);
  if (TSN_UNLIKELY(!open)) {
    copy.cancel();
    return kNotPushed;
  }
  char* peer = (char*)route.translate(dst);
  copy.finish(peer + cut.head);
  if (cut.head + cut.tail != 0) detail::copy_edges(peer, (const char*)src, cut, {0, 1});
  return route.base - route.heap_base;
}

} // namespace tsn
