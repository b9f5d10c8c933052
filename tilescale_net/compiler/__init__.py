"""From traced primitives to compiled kernels: TVM operators, their lowering, `tsn.jit`."""

from tilescale_net.compiler.toolchain import check_tilelang as _check_tilelang

_check_tilelang()

from tilescale_net.compiler.passes import effects  # noqa: E402

effects.install()
