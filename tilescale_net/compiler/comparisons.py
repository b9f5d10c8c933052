"""`a < f() < b` in a kernel evaluates its middle once, as in Python.

tilelang writes such a comparison as `a < f() and f() < b` before it traces the kernel. Nothing in the traced kernel
distinguishes that from two calls which its author wrote, so the comparison is rewritten before: what stands in the
middle becomes the argument of a function, `(lambda l, m: l < m and m < b)(a, f())`.
"""

import ast

from tilelang.language.eager.ast import DSLMutator

_of_tilelang = DSLMutator.visit_Compare


def _visit_compare(self: DSLMutator, node: ast.Compare) -> ast.expr:
    middle = node.comparators[0]
    if len(node.ops) == 1 or not _has_call(node.comparators[:-1]):
        return _of_tilelang(self, node)
    names = self.get_tmp(), self.get_tmp()

    def read(name: str) -> ast.expr:
        return ast.Name(name, ast.Load())

    first = ast.Compare(read(names[0]), node.ops[:1], [read(names[1])])
    rest = ast.Compare(read(names[1]), node.ops[1:], node.comparators[1:])
    parameters = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    function = ast.Lambda(parameters, ast.BoolOp(ast.And(), [first, rest]))
    call = ast.Call(function, [node.left, middle], [])
    for new in (call, function, function.body, first, rest):
        ast.copy_location(new, node)
    return self.visit(ast.fix_missing_locations(call))


def _has_call(parts: list[ast.expr]) -> bool:
    return any(isinstance(inner, ast.Call) for part in parts for inner in ast.walk(part))


def install() -> None:
    """Make tilelang trace such comparisons so from now on."""
    DSLMutator.visit_Compare = _visit_compare
