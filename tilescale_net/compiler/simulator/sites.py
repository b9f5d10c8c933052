"""Where the author's primitives stand, for the errors of the simulator; statements.py does the same for plain accesses.

Each call gets its number in a table of lines as one more argument; the lowering rule turns it into a comment before the
call, which host_source.py finds. The generated code holds numbers only, so that a kernel that moves within its file
stays the same code.
"""

import os
from collections.abc import Container

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import op_name, our_calls, typed_name
from tilescale_net.compiler.operators import OPERATORS, PURE

# All that can fail or be waited for; what is the same every time cannot.
_NUMBERED = {operator.op_name: operator for operator in OPERATORS.values() if operator.effect != PURE}


def lines_of(func: tirx.PrimFunc, numbered: Container[str] = _NUMBERED) -> list[tuple[str, str]]:
    """TVM's name of each call of a traced kernel, in order, with its line ("file.py:12") and, behind a tab, the name that its
    author typed (of the beginning of a range, that of the range); passes drop the lines later on.

    Args:
        numbered: TVM's names of the operators whose calls count.
    """
    found = []
    for call in our_calls(func.body):
        if op_name(call) in numbered:
            span = call.span
            known = span is not None and span.source_name is not None
            line = f"{os.path.basename(str(span.source_name.name))}:{span.line}" if known else ""
            found.append((op_name(call), f"{line}\t{range_name(call) or typed_name(call)}"))
    return found


def range_name(call: tirx.Call) -> str:
    """The name of a range that a call begins, or ''."""
    return OPERATORS["range_begin"].read(call).name if op_name(call) == "tsn.range_begin" else ""


def number(func: tirx.PrimFunc, calls: list[tuple[str, str]], statements: list[str]) -> tuple[tirx.PrimFunc, list[str]]:
    """Number the calls of a prepared kernel.

    Args:
        calls: `lines_of` the kernel as it was traced.
        statements: lines that have numbers already, see statements.py.

    Returns:
        The function, and the line, with the name behind it, that each number stands for; calls have none where the passes have moved them about.
    """
    lines = list(dict.fromkeys([*statements, *(line for _, line in calls)]))
    met: list[str] = []

    def add(call):
        if op_name(call) not in _NUMBERED:
            return None
        met.append(op_name(call))
        if len(met) > len(calls):
            return None
        return with_number(call, lines.index(calls[len(met) - 1][1]))

    body = ir_transform(func.body, None, add, ["tirx.Call"])
    if not same_calls(met, calls):
        return func, statements
    return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs), lines


def with_number(call: tirx.Call, number: int) -> tirx.Call:
    """A call with its number as one more argument."""
    return tirx.Call(call.dtype, call.op, [*call.args, tirx.IntImm("int32", number)], annotations=call.annotations)


def same_calls(met: list[str], calls: list[tuple[str, str]]) -> bool:
    """Whether the passes have left the calls of a kernel in their order; they make some waits order TMA as well."""
    return [name.removesuffix("_async") for name in met] == [name.removesuffix("_async") for name, _ in calls]
