"""Leaves out the passes that tilelang repeats for the sake of generated code: more than half of the time of lowering a kernel.

tilelang simplifies a kernel nine times. For the simulator, whose source another compiler simplifies, once is enough: the
source of this package's kernels is the same to the letter. Nor are conditions moved out of loops, which changes the source of
one kernel in thirty and takes a twentieth of the time: they stay where the author wrote them.
"""

from tvm.ir.instrument import pass_instrument


@pass_instrument
class SimplifyOnce:
    """A pass instrument for one lowering."""

    def __init__(self):
        self._previous = ""
        self._simplified = False

    def should_run(self, module, info) -> bool:
        name, previous = str(info.name), self._previous
        self._previous = name
        if name == "tl.Simplify":
            return not self._simplified
        if name == "s_tir.HoistIfThenElse":
            return False
        return (name, previous) != ("tirx.Simplify", "tl.LowerIntrin")  # what follows only prints expressions

    def run_after_pass(self, module, info) -> None:
        if str(info.name) == "tl.Simplify":
            self._simplified = True
