"""Executes calls with an effect exactly once, in the order in which their author wrote them.

TVM repeats, moves and drops parts of expressions: `x % 3` becomes an expression with two x, an index appears in its
guard and in its access, `x % 3 < 0` is known to be false. That is right for values, not for calls such as atomics
(tile-ai/tilelang#2594, #2650). So each call becomes a statement that binds its result to a variable. The primitives of
this package are bound while they are traced (language/_trace.py); here

- tilelang's atomics, random numbers, warp operations and external calls are bound before their statement;
- calls behind `and`, `or` or in an arm of a choice are executed only if that part is evaluated: the statement gets an
  `if` before it;
- conditions of `while` are evaluated in each round;
- loops over the elements of a vector take them one by one: tilelang copies bindings inside them to their uses.

`a < f() < b` evaluates its middle once too. tilelang rewrites such a comparison to `a < f() and f() < b` before it
traces the kernel, which the trace cannot distinguish from two calls by the author. So the comparison is rewritten
earlier: the middle becomes the argument of a function, `(lambda l, m: l < m and m < b)(a, f())`.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from tilescale_net.compiler.ir import (
    OPAQUE_OPS,
    OUR_OPS,
    Node,
    changed_block,
    collect,
    kernel_name,
    location_suffix,
    op_name,
    our_calls,
    sequence,
)
from tilescale_net.compiler.operators import DEFERRED
from tilescale_net.compiler.versions import DSLMutator
from tilescale_net.errors import KernelError

# Prefix of variables that hold the result of a primitive until the author names them.
UNNAMED = "tsn."
# Operators of tilelang with a value and an effect, which must not be executed twice. Lanes of a warp wait for one
# another in its operations, so these must not move into a condition either.
_EFFECTS = (
    "tl.atomic_", "tirx.atomic_", "tl.rng_rand", "tl.syncthreads_", "tirx.call_extern",
    "tl.shfl_", "tl.any_sync", "tl.all_sync", "tl.ballot", "tl.activemask", "tl.match_", "tl.warp_reduce_", "tirx.tvm_warp_",
)  # fmt: skip
_CHOICE = "tirx.if_then_else"
_EXPRESSIONS = ["tirx.Var", "tirx.And", "tirx.Or", "tirx.Select", "tirx.Call"]
_STATEMENTS = [
    f"tirx.{name}" for name in ("Bind", "BufferStore", "Evaluate", "IfThenElse", "While", "For", "AssertStmt")
]


_NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


def deferred(variable: tirx.Var, value: tirx.PrimExpr) -> tirx.Call:
    """A statement of a trace: compute `value` before each use of `variable` in the next statement."""
    return tirx.Call("void", tvm.ir.Op.get(DEFERRED), [variable, value])


def _is_effect(node: Node) -> bool:
    return op_name(node).startswith(_EFFECTS) and str(node.dtype) not in ("", "void", "handle")


def has_effect(expr: tirx.PrimExpr) -> bool:
    """Whether `expr` must not be repeated: it calls something with an effect, or does so under a condition."""

    def chooses(node: Node) -> bool:
        choice = isinstance(node, (tirx.And, tirx.Or, tirx.Select)) or op_name(node) == _CHOICE
        return choice and any(map(_is_unnamed, _variables(node)))

    return _any(expr, lambda node: _is_effect(node) or chooses(node))


def _any(expr: Node, wanted: Callable[[Node], Any]) -> bool:
    return bool(collect(expr, wanted))


def rewrite(func: tirx.PrimFunc) -> tirx.Stmt:
    """The body of `func` with every call in its own statement, see above. Raises KernelError: the result of a primitive
    is used in an arm of T.if_then_else or T.Select, which Python evaluates in any case, or outside of its condition."""
    _check_arms(func)
    rewriter = _Rewriter(func)
    body = ir_transform(func.body, None, _one_by_one, ["tirx.For"])
    body = ir_transform(body, None, rewriter.statement, _STATEMENTS)
    rewriter.check_all_used()
    if rewriter.temporaries:
        body = ir_transform(body, None, rewriter.allocate, ["tirx.SBlock"])
    body = _without_unused(body)
    return ir_transform(body, None, lambda node: sequence(node.seq), ["tirx.SeqStmt"])


def _one_by_one(loop: tirx.For) -> tirx.For | None:
    """A vectorised loop with a call that has a value and an effect, as an ordinary loop, which makes no such copies."""
    if loop.kind != tirx.ForKind.VECTORIZED or not _any(loop.body, _has_value_and_effect):
        return None
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, loop.annotations)


def _has_value_and_effect(node: Node) -> bool:
    return _is_effect(node) or (op_name(node) in OPAQUE_OPS and str(node.dtype) not in ("", "void", "handle"))


def _check_arms(func: tirx.PrimFunc) -> None:
    bound, arms, later = {}, [], set()

    def look(node: Node) -> None:
        if isinstance(node, tirx.Bind) and _is_unnamed(node.var):
            bound[node.var] = node.value
        elif op_name(node) == DEFERRED:
            later.add(node.args[0])
        elif op_name(node) == _CHOICE:
            arms.append((node.args[0], [arm for arm in node.args[1:] if op_name(arm) not in OUR_OPS]))
        elif isinstance(node, tirx.Select):
            arms.append((node.condition, [node.true_value, node.false_value]))

    post_order_visit(func.body, look)
    for condition, values in arms:
        for variable in {v for arm in values for v in _variables(arm)} - set(_variables(condition)) - later:
            if variable in bound:
                calls = our_calls(bound[variable])
                raise KernelError(
                    f"kernel {kernel_name(func)}: {variable.name.replace(UNNAMED, 'N.', 1)} stands in an arm of a choice such "
                    "as T.if_then_else, and would be executed under any condition; write `a if condition else b` "
                    "or an `if` statement, or bind it to a name first if that is meant"
                    + (location_suffix(calls[-1]) if calls else "")
                )


def _is_unnamed(expr: tirx.PrimExpr) -> bool:
    """Whether `expr` is the result of a primitive that its author has not bound to a name."""
    return isinstance(expr, tirx.Var) and expr.name.startswith(UNNAMED)


def _variables(expr: Node) -> list[tirx.Var]:
    return collect(expr, lambda node: isinstance(node, tirx.Var))


def _without_unused(body: tirx.Stmt) -> tirx.Stmt:
    """Turns calls whose result is not used into plain statements."""
    body = ir_transform(body, None, lambda node: _NOTHING if _is_unnamed(node.value) else None, ["tirx.Evaluate"])
    used = set(_variables(body))

    def unbind(node: Node) -> tirx.Stmt | None:
        if not _is_unnamed(node.var) or node.var in used:
            return None
        if op_name(node.value) == _CHOICE and op_name(node.value.args[1]) in OUR_OPS:  # a guarded access
            return tirx.IfThenElse(node.value.args[0], tirx.Evaluate(node.value.args[1]), None)
        return tirx.Evaluate(node.value)

    return ir_transform(body, None, unbind, ["tirx.Bind"])


class _Rewriter:
    """Rewrites the statements of one kernel, inner ones first."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._name = kernel_name(func)
        self._definitions: dict[tirx.Var, tirx.PrimExpr] = {}
        self._done: dict[tirx.Var, list[tirx.Stmt]] = {}
        # Evaluated nodes of the current statement: node, its value, its condition.
        self._known: list[tuple[tirx.PrimExpr, tirx.PrimExpr, list[tirx.Stmt]]] = []
        self._open: list[list[tirx.Stmt]] = []
        self.temporaries: list[tirx.Buffer] = []
        for call in collect(func.body, lambda node: op_name(node) == DEFERRED):
            self._definitions[call.args[0]] = call.args[1]

    # -- statements ---------------------------------------------------------------------------------------------------

    def statement(self, node: tirx.Stmt) -> tirx.Stmt | None:
        """`node` behind the statements of its calls; None without calls."""
        if isinstance(node, tirx.Evaluate) and op_name(node.value) == DEFERRED:
            return _NOTHING
        parts = self._parts(node)
        if not any(self._is_impure(part) for part in parts):
            return None
        self._known = []
        out: list[tirx.Stmt] = []
        self._open.append(out)
        if isinstance(node, tirx.While):
            result = self._while(node)
        else:
            result = self._with(node, [self._value(node, part, out) for part in parts])
        self._open.pop()
        return sequence([*out, result])

    @staticmethod
    def _parts(node: Node) -> list[tirx.PrimExpr]:
        """The expressions of a statement, in the order of their evaluation."""
        if isinstance(node, tirx.BufferStore):
            return [*node.indices, node.value]
        if isinstance(node, (tirx.Bind, tirx.Evaluate)):
            return [node.value]
        return [node.min, node.extent] if isinstance(node, tirx.For) else [node.condition]

    @staticmethod
    def _with(node: Node, parts: list[tirx.PrimExpr]) -> tirx.Stmt:
        """The statement with other expressions."""
        span = getattr(node, "span", None)
        if isinstance(node, tirx.BufferStore):
            return tirx.BufferStore(node.buffer, parts[-1], parts[:-1], node.predicate, span)
        if isinstance(node, tirx.Bind):
            return tirx.Bind(node.var, parts[0], span)
        if isinstance(node, tirx.Evaluate):
            return tirx.Evaluate(parts[0], span)
        if isinstance(node, tirx.IfThenElse):
            return tirx.IfThenElse(parts[0], node.then_case, node.else_case, span)
        if isinstance(node, tirx.AssertStmt):
            return tirx.AssertStmt(parts[0], node.error_kind, node.message_parts, span)
        step = getattr(node, "step", None)
        return tirx.For(
            node.loop_var, parts[0], parts[1], node.kind, node.body, node.thread_binding, node.annotations, step, span
        )

    def _while(self, node: tirx.While) -> tirx.Stmt:
        again = self._temporary("bool")
        true = tirx.const(True, "bool")
        inner: list[tirx.Stmt] = []
        self._open.append(inner)
        inner.append(tirx.BufferStore(again, self._expr(node.condition, inner), [0]))
        self._open.pop()
        inner.append(tirx.IfThenElse(again[0], node.body, None))
        return sequence([tirx.BufferStore(again, true, [0]), tirx.While(again[0], sequence(inner))])

    # -- expressions --------------------------------------------------------------------------------------------------

    def _is_impure(self, expr: tirx.PrimExpr) -> bool:
        return bool(self._effects_of(expr))

    def _value(self, node: tirx.Stmt, expr: tirx.PrimExpr, out: list[tirx.Stmt]) -> tirx.PrimExpr:
        """As `_expr`; a call that already is a statement, or is bound to a name, stays."""
        if isinstance(node, (tirx.Bind, tirx.Evaluate)) and _is_effect(expr):
            return self._arguments(expr, out)
        return self._expr(expr, out)

    def _arguments(self, call: tirx.Call, out: list[tirx.Stmt]) -> tirx.Call:
        args = [self._expr(arg, out) if isinstance(arg, tirx.PrimExpr) else arg for arg in call.args]
        return tirx.Call(call.dtype, call.op, args, annotations=call.annotations, span=call.span)

    def _expr(self, expr: tirx.PrimExpr, out: list[tirx.Stmt]) -> tirx.PrimExpr:
        """`expr` without calls that have an effect; their statements are appended to `out`."""
        if not self._is_impure(expr):
            return expr

        def visit(node: Node) -> Any:
            if isinstance(node, tirx.Var):
                return self._settle(node, out) if node in self._definitions else None
            for known, value, scope in self._known:
                if self._is_same(known, node) and any(scope is other for other in self._open):
                    return value
            value = self._evaluated(node, out)
            if value is not None:
                self._known.append((node, value, out))
            return value

        return ir_transform(tirx.Evaluate(expr), visit, None, _EXPRESSIONS).value

    def _is_same(self, a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
        """Whether two parts of an expression are one part of the author's that TVM has repeated, and perhaps
        simplified: simplified nodes are new, but their calls are the old ones."""
        if a.same_as(b):
            return True
        mine, others = self._effects_of(a), self._effects_of(b)
        return bool(mine) and tvm.ir.structural_equal(a, b) and all(x.same_as(y) for x, y in zip(mine, others))

    def _effects_of(self, expr: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        return collect(expr, lambda n: _is_effect(n) or (isinstance(n, tirx.Var) and n in self._definitions))

    def _evaluated(self, node: Node, out: list[tirx.Stmt]) -> tirx.PrimExpr | None:
        """The value of a call or a choice, computed by statements in `out`; None for an expression that may stay."""
        if isinstance(node, (tirx.And, tirx.Or)):
            return self._short_circuit(node, out) if self._is_impure(node.b) else None
        if isinstance(node, tirx.Select):
            arms = (node.condition, node.true_value, node.false_value)
        elif op_name(node) == _CHOICE:
            arms = tuple(node.args)
        else:
            return self._bind(node, out) if _is_effect(node) else None
        return self._choice(arms, out) if any(map(self._is_impure, arms[1:])) else None

    def _settle(self, variable: tirx.Var, out: list[tirx.Stmt]) -> tirx.Var:
        if variable not in self._done:
            out.append(tirx.Bind(variable, self._expr(self._definitions[variable], out)))
            self._done[variable] = out
        elif not any(scope is self._done[variable] for scope in self._open):
            self._refuse(variable, "is used a second time outside of the condition that contains it")
        return variable

    def _bind(self, call: tirx.Call, out: list[tirx.Stmt]) -> tirx.Var:
        variable = tirx.Var("result", call.dtype)
        out.append(tirx.Bind(variable, self._arguments(call, out)))
        return variable

    def _short_circuit(self, node: tirx.And | tirx.Or, out: list[tirx.Stmt]) -> tirx.PrimExpr:
        value = self._temporary("bool")
        out.append(tirx.BufferStore(value, self._expr(node.a, out), [0]))
        condition = value[0] if isinstance(node, tirx.And) else tirx.Not(value[0])
        out.append(tirx.IfThenElse(condition, self._assigned(value, node.b), None))
        return value[0]

    def _choice(self, arms: Sequence[tirx.PrimExpr], out: list[tirx.Stmt]) -> tirx.PrimExpr:
        value = self._temporary(str(arms[1].dtype))
        condition = self._expr(arms[0], out)
        out.append(tirx.IfThenElse(condition, self._assigned(value, arms[1]), self._assigned(value, arms[2])))
        return value[0]

    def _assigned(self, value: tirx.Buffer, expr: tirx.PrimExpr) -> tirx.Stmt:
        inner: list[tirx.Stmt] = []
        self._open.append(inner)
        inner.append(tirx.BufferStore(value, self._expr(expr, inner), [0]))
        self._open.pop()
        return sequence(inner)

    def _temporary(self, dtype: str) -> tirx.Buffer:
        self.temporaries.append(tirx.decl_buffer((1,), dtype, "chosen", scope="local.var"))
        return self.temporaries[-1]

    def allocate(self, block: tirx.SBlock) -> tirx.SBlock | None:
        """The launch's block with the temporaries that its body uses."""
        if block.name_hint != "tilelang_root":
            return None
        stores = collect(block.body, lambda node: isinstance(node, tirx.BufferStore))
        mine = [t for t in self.temporaries if any(t.same_as(store.buffer) for store in stores)]
        return changed_block(block, block.body, [*block.alloc_buffers, *mine])

    # -- errors -------------------------------------------------------------------------------------------------------

    def check_all_used(self) -> None:
        """Raise KernelError if a call would be lost because no condition holds its result."""
        for variable in self._definitions:
            if variable not in self._done:
                self._refuse(variable, "has a result that the condition that contains it does not use")

    def _refuse(self, variable: tirx.Var, what: str) -> NoReturn:
        calls = our_calls(self._definitions[variable])
        name = variable.name.replace(UNNAMED, "N.", 1)
        raise KernelError(
            f"kernel {self._name}: {name} {what}; bind it to a name first"
            + (location_suffix(calls[-1]) if calls else "")
        )


# -- chained comparisons ----------------------------------------------------------------------------------------------

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
