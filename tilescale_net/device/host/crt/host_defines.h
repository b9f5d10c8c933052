// CUDA's function and variable attributes, for a compiler without them.
// CUDA's own headers (vector_types.h, cuda_fp16.h, …) include a file of this name, which another wheel contains; a
// host compiler needs only a few empty macros of it.
#pragma once

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
// No __noinline__: headers of libstdc++ 13 and newer use it as the name of an attribute, and nothing here needs it.
#define __launch_bounds__(...)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
