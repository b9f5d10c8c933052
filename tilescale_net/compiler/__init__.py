"""From traced primitives to compiled kernels: TVM operators, their lowering, `tsn.jit`."""

from tilescale_net.compiler.toolchain import check_tilelang as _check_tilelang

_check_tilelang()

from tilescale_net.compiler import comparisons  # noqa: E402

comparisons.install()
