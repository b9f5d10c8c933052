// Ranges that a kernel's author names, for the timeline of TSN_TRACE. A warp's first lane draws them.
#pragma once

#include "scope.h"

namespace tsn {

// Nothing is left of them on a GPU, but where a trace is written: see traced_calls.h.
TSN_DEVICE void range_begin(const Context*) {
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_leader<Scope::warp>()) platform::range_begins();
}
TSN_DEVICE void range_end(const Context*) {
  if constexpr (platform::kDefersRemoteWrites)
    if (scope_leader<Scope::warp>()) platform::range_ends();
}

} // namespace tsn
