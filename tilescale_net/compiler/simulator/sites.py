"""Where the author's primitives stand, for the errors of the simulator; statements.py does the same for plain accesses.

Each call gets its number in a table of lines as one more argument; the lowering rule turns it into a comment before the
call, which host_source.py finds. The generated code holds numbers only, so that a kernel that moves within its file
stays the same code.
"""

import os

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import op_name, our_calls
from tilescale_net.compiler.operators import OPERATORS

_NUMBERED = {operator.op_name: operator for operator in OPERATORS.values() if operator.result in ("void", "uint64")}
_NUMBERED["tsn.test"] = OPERATORS["test"]


def lines_of(func: tirx.PrimFunc) -> list[tuple[str, str]]:
    """Name and line ("file.py:12") of each call of a traced kernel, in order; passes drop the lines later on."""
    found = []
    for call in our_calls(func.body):
        if op_name(call) in _NUMBERED:
            span = call.span
            known = span is not None and span.source_name is not None
            found.append(
                (op_name(call), f"{os.path.basename(str(span.source_name.name))}:{span.line}" if known else "")
            )
    return found


def number(func: tirx.PrimFunc, calls: list[tuple[str, str]], statements: list[str]) -> tuple[tirx.PrimFunc, list[str]]:
    """Number the calls of a prepared kernel.

    Args:
        calls: `lines_of` the kernel as it was traced.
        statements: lines that have numbers already, see statements.py.

    Returns:
        The function, and the line that each number stands for; calls have none where the passes have moved them about.
    """
    lines = list(dict.fromkeys([*statements, *(line for _, line in calls)]))
    met: list[str] = []

    def add(call):
        if op_name(call) not in _NUMBERED:
            return None
        met.append(op_name(call))
        if len(met) > len(calls):
            return None
        index = tirx.IntImm("int32", lines.index(calls[len(met) - 1][1]))
        return tirx.Call(call.dtype, call.op, [*call.args, index], annotations=call.annotations)

    body = ir_transform(func.body, None, add, ["tirx.Call"])
    if [name.removesuffix("_async") for name in met] != [name.removesuffix("_async") for name, _ in calls]:
        return func, statements
    return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs), lines
