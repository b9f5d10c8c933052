// Headers of a generated kernel on the host; host_source.py puts them before the kernel's source.
#pragma once

// Peers change memory that a kernel reads, and so do other fibers: the promise of no aliasing does not hold here.
#define __restrict__
#define CUTE_ALIGNAS(n) alignas(n)

#include "builtins.h"

#include "atomics.h"
#include "checked.h"
#include "tilelang.h"

using nv_bfloat162 = __nv_bfloat162;
using nv_bfloat16 = __nv_bfloat16;

// Line of the next statement, in the kernel's table.
inline void tsn_sim_line(int site) { tsn::sim::self().site = site; }

// The library's side of simulator_api.h.
extern "C" {
__attribute__((visibility("default"))) const tsn::sim::Api* tsn_sim_api = nullptr;
__attribute__((visibility("default"))) tsn::sim::Thread* tsn_sim_self = nullptr;
__attribute__((visibility("default"))) extern const uint32_t tsn_sim_api_version = tsn::sim::kApiVersion;
}
