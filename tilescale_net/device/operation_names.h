// What the operations of context.h are called in texts for people. For host code only.
#pragma once

#include "context.h"

namespace tsn {

constexpr const char* kOperationNames[] = {"none",   "put",   "get",     "put_signal", "put_value",
                                           "signal", "wait",  "test",    "atomic",     "fence",
                                           "quiet",  "flush", "barrier", "remote",     "barrier_grid"};
static_assert(sizeof(kOperationNames) / sizeof(kOperationNames[0]) == kOpBarrierGrid + 1, "each operation has a name");

} // namespace tsn
