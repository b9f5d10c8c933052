"""Statements with effectful calls in all kinds of expressions, as text that is a kernel's body and plain Python alike.

A statement uses `c` and `d` (counters: of N's and of tilelang's atomics), `x` (eight constants), `out` (eight words), `n`
(a local variable, 0 at first), `me` and `run` (2, known at run time only). In Python, `Reference` stands in for N and T.
One difference is tilelang's: in `out[i()] = v()` the index comes first.
"""

import ast
import importlib.util
import random
import sys
from dataclasses import dataclass, field

X = [3, -7, 12, 5, -1, 8, 0, 2]
# Statements whose calls used to be carried out twice, three times or not at all, and their brothers.
FIXED = """
out[0] = N.atomic_add(c[0], 1, me) % 3
out[0] = N.atomic_add(c[0], 1, me) // 3
out[0] = T.abs(N.atomic_add(c[0], 1, me) - 5)
out[0] = N.atomic_add(c[0], 1, me) * 0
out[0] = N.atomic_add(c[0], 1, me) % 1 + 4
out[0] = T.max(N.atomic_add(c[0], 1, me), N.atomic_add(c[0], 3, me)) // 2
out[N.atomic_add(c[0], 1, me)] = 1
out[N.atomic_add(c[0], 1, me)] = N.atomic_add(c[0], 1, me)
out[N.atomic_add(c[0], 1, me) + 1] += 5
out[N.atomic_add(c[0], 1, me) + run] = N.ld(x[N.atomic_add(c[0], 1, me)])
out[N.atomic_add(c[N.atomic_add(c[N.atomic_add(c[0], 1, me)], 1, me)], 1, me)] = 7
N.put_value(out[N.atomic_add(c[0], 1, me)], N.atomic_add(c[0], 1, me) % 5, me)
N.st(out[N.atomic_add(c[0], 1, me)], N.atomic_add(c[0], 1, me) % 5)
N.st(out[T.atomic_add(d[0], 1, return_prev=True)], 6)
N.atomic_add(c[0], 1, me)
N.atomic_add(c[run], N.atomic_add(c[0], 1, me), me)
N.atomic_add(out[N.atomic_add(c[0], 1, me)], T.atomic_add(d[0], 1, return_prev=True) + 4, me)
while N.atomic_add(c[0], 1, me) % 3 < 0:|n = n + 1
while N.atomic_add(c[0], 1, me) < 3:|n = n + 1
while n < 3 and N.atomic_add(c[0], 1, me) < 9:|n = n + 1
while n < 5 and (N.atomic_add(c[0], 1, me) % 3 != 1 or N.atomic_add(c[1], 1, me) < 2):|n = n + 1
while not N.ld(c[0]) == 3:|N.atomic_add(c[0], 1, me)
while T.atomic_add(d[0], 1, return_prev=True) % 5 < 3:|n = n + 1
while N.atomic_add(c[0], 1, me) < 9:|n = n + 1|if n == 2:|    continue|if N.atomic_add(c[0], 1, me) > 5:|    break
if N.atomic_add(c[0], 1, me) % 2 == 0:|out[0] = 1|else:|out[0] = 2
if run > 5 and N.atomic_add(c[0], 1, me) == 0:|out[0] = 1
if run > 1 and N.atomic_add(c[0], 1, me) == 0:|out[0] = 1
if run > 1 or N.atomic_add(c[0], 1, me) == 0:|out[0] = 1
if 0 <= N.atomic_add(c[0], 2, me) < 1 < N.atomic_add(c[0], 2, me) < 3:|out[0] = 1
if 0 <= T.atomic_add(d[0], 2, return_prev=True) < 1:|out[0] = 1
if 0 <= T.atomic_add(d[0], 2, return_prev=True) < 3 < T.atomic_add(d[1], 2, return_prev=True) + 5 <= run + 5:|out[0] = 1
if 0 < T.atomic_add(d[0], 2, return_prev=True) < N.atomic_add(c[0], 1, me):|out[0] = 1
if 0 <= (N.atomic_add(c[0], 2, me) if run > 1 else N.ld(c[1])) < 1:|out[0] = 1
if 0 <= (T.atomic_add(d[0], 2, return_prev=True) if run > 5 else N.atomic_add(c[1], 2, me)) < 1:|out[0] = 1
out[0] = 5 if N.atomic_add(c[0], 1, me) <= N.atomic_add(c[0], 1, me) % 3 < run else 6
while 0 <= T.atomic_add(d[0], 1, return_prev=True) < 3:|n = n + 1
while n < (N.atomic_add(c[0], 1, me) if n < 2 else T.atomic_add(d[0], 1, return_prev=True)) + 2 < 4:|n = n + 1
if run > 5 and 0 <= T.atomic_add(d[0], 2, return_prev=True) < 1:|out[0] = 1
if 0 <= T.atomic_add(d[0], 2, return_prev=True) and T.atomic_add(d[0], 2, return_prev=True) < 3:|out[0] = 1
if run > 5 and N.ld(x[N.atomic_add(c[0], 1, me)]) > 0 or T.atomic_add(d[0], 1, return_prev=True) < 3:|out[0] = 1
if run > 1 and N.ld(x[N.atomic_add(c[0], 1, me)]) % 2 == 1:|out[0] = 1
out[0] = N.atomic_add(c[0], 1, me) if run > 5 else N.atomic_add(c[1], 1, me) // 2
out[0] = T.atomic_add(d[0], 1, return_prev=True) % 3 if run > 1 else T.atomic_add(d[1], 1, return_prev=True)
out[0] = T.atomic_add(d[0], 1, return_prev=True) % 3
out[T.atomic_add(d[0], 1, return_prev=True)] = T.atomic_add(d[0], 1, return_prev=True)
out[T.atomic_add(d[0], 1, return_prev=True)] += 3
T.atomic_add(d[0], 1, return_prev=True)
for i in T.serial(N.atomic_add(c[0], 3, me) % 4 + run):|out[i] = N.atomic_add(c[0], 1, me) % 5
for i in T.unroll(4):|out[i] = N.atomic_add(c[0], 1, me) // 2
for i in T.serial(N.atomic_add(c[0], 1, me), N.atomic_add(c[0], 4, me) + 4):|out[i] = 1
n = N.atomic_add(c[0], 1, me) % 2|out[n] = 3
v = N.atomic_add(c[0], 1, me)|out[0] = v * v + v % 3|out[1] = v
v = N.atomic_add(c[0], 1, me)|N.atomic_add(c[0], 5, me)|out[run] = v // 2 + 1
v = [N.atomic_add(c[0], 1, me)]|out[0] = v[0] + 1|out[1] = v[0] % 2
out[run] = square(N.atomic_add(c[0], 1, me) + 2)
for i in T.serial(T.abs(T.abs(run) if run == 0 else T.atomic_add(d[0], 3, return_prev=True)) % 4):|out[i] = 1
for i in T.serial(T.abs(T.abs(run) if run == 0 else N.atomic_add(c[0], 3, me)) % 4 + 1):|out[i] = 1
out[T.shfl_sync(x[7], 0, 32, 1)] = 3
out[T.shfl_xor(x[7], 0, 32, 1)] = T.shfl_down(x[5], 0, 32, 1) % 3
N.st(out[T.shfl_up(x[7], 0, 32, 1)], T.shfl_sync(x[1], 0, 32, 1) // 3)
out[T.any_sync(run > 1, 1)] = T.all_sync(run > 5, 1) % 3 + 4
out[T.cast(T.ballot_sync(run > 1, 1), "int32")] = T.cast(T.activemask(), "int32") // 3
N.put_value(out[T.cast(T.match_any_sync(x[2], 1), "int32")], T.cast(T.match_all_sync(x[2], 1), "int32") % 3, me)
if run > 5 and T.shfl_sync(x[7], 0, 32, 1) > 1 or T.any_sync(run > 1, 1) > 0:|out[0] = 1
""".strip().splitlines()
# The same of operations that a whole warp has to make: no single thread can run them.
OF_A_WARP = """
out[T.cast(T.ballot(run > 1), "int32")] = 1
out[T.warp_reduce_sum(x[2])] = T.warp_reduce_max(x[3]) % 3
out[T.warp_reduce_min(x[2]) // 3] = T.abs(T.warp_reduce_bitand(x[3]) - T.warp_reduce_bitor(x[1]))
""".strip().splitlines()


@dataclass
class Grammar:
    """Draws random expressions and statements."""

    random: random.Random
    leaves: int = 0

    def effect(self, depth: int) -> str:
        self.leaves += 1
        place = (
            f"({self.number(depth - 1)}) % 8" if depth > 0 and self.random.random() < 0.2 else self.random.randrange(8)
        )
        kind = self.random.random()
        if kind < 0.1:
            return f"T.shfl_sync(x[{place}], 0, 32, 1)"
        if kind < 0.2:
            return f"T.atomic_add(d[{self.random.randrange(8)}], 1, return_prev=True)"
        return f"N.ld(x[{place}])" if kind < 0.35 else f"N.atomic_add(c[{place}], {self.random.randrange(1, 4)}, me)"

    def number(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.15:
            return self.random.choice([str(self.random.randrange(-4, 9)), "run", f"x[{self.random.randrange(8)}]", "n"])
        if self.random.random() < 0.35:
            return self.effect(depth)
        a, b = self.number(depth - 1), self.number(depth - 1)
        form = self.random.choice(
            ["({a} + {b})", "({a} - {b})", "({a} % 5 * ({b} % 3))", "({a} // 3)", "({a} % 4)", "T.max({a}, {b})",
             "T.min({a}, {b})", "T.abs({a})", "({a} if {c} else {b})", "x[({a}) % 8]", "square({a} % 9)"]
        )  # fmt: skip
        return form.format(a=a, b=b, c=self.condition(depth - 1) if "{c}" in form else "")

    def condition(self, depth: int) -> str:
        if depth > 0 and self.random.random() < 0.5:
            return self.random.choice(["({} and {})", "({} or {})", "(not {0} or {1})"]).format(
                self.condition(depth - 1), self.condition(depth - 1)
            )
        a, b = self.number(depth - 1), self.number(depth - 1)
        form = self.random.choice(["({} < {})", "({} == {} % 4)", "({} % 3 < {} % 5)", "(-3 <= {} < {})"])
        return form.format(a, b)

    def statement(self) -> str:
        depth = 3
        form = self.random.randrange(6)
        if form == 0:
            return f"out[{self.random.randrange(8)}] = {self.number(depth)}"
        if form == 1:
            return f"out[({self.number(depth)}) % 8] = {self.number(depth)}"
        if form == 2:
            return f"if {self.condition(depth)}:|out[0] = {self.number(1)}|else:|out[1] = {self.number(1)}"
        if form == 3:
            return f"while n < 3 and {self.condition(depth)}:|n = n + 1"
        if form == 4:
            return f"for i in T.serial(({self.number(depth)}) % 4):|out[i] = {self.number(2)}"
        return f"N.st(out[({self.number(depth)}) % 8], {self.number(depth)})"


def random_statements(seed: int, count: int) -> list[str]:
    """`count` statements from a seed, each with calls that have an effect."""
    grammar, found = Grammar(random.Random(seed)), []
    while len(found) < count:
        before = grammar.leaves
        statement = grammar.statement()
        if grammar.leaves > before:
            found.append(statement)
    return found


def _block(statement: str) -> list[str]:
    """The lines of a statement; `|` ends a line, and what follows `:` is indented unless it has its own indent."""
    lines, indent = [], ""
    for line in statement.split("|"):
        if line.startswith("else"):
            indent = ""
        lines.append(indent + line)
        if line.endswith(":") and not line.startswith("    ") and not indent:
            indent = "    "
    return lines


_KERNEL = """
import tilelang.language as T
import tilescale_net.language as N


def square(v):
    return v * v


def keep(kept, v):
    kept[0] = v
    return v


def make():
    @T.prim_func
    def kernel(ctx: N.Context(), cs: T.Tensor(({count}, 8), "int32"), ds: T.Tensor(({count}, 8), "int32"),
               x: T.Tensor((8,), "int32"), outs: T.Tensor(({count}, 8), "int32"), run: T.int32):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            me = N.my_pe()
            n = T.alloc_var("int32")
            if tx == 0:
{body}
    return kernel
"""


def kernel(statements: list[str], path) -> object:
    """The traced kernel of these statements, each with counters and outputs of its own; its source goes to `path`."""
    lines = []
    for index, statement in enumerate(statements):
        for line in ["n = 0", *_block(statement)]:
            for name, buffer in (("c", "cs"), ("d", "ds"), ("out", "outs")):
                line = _renamed(line, name, f"{buffer}[{index}, ")
            lines.append(" " * 16 + line)
    path.write_text(_KERNEL.format(count=len(statements), body="\n".join(lines)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.make()


def _renamed(line: str, name: str, access: str) -> str:
    for before in " (=[-":
        line = line.replace(f"{before}{name}[", f"{before}{access}")
    return access + line[len(name) + 1 :] if line.startswith(f"{name}[") else line


@dataclass
class Reference:
    """Python's meaning of one statement."""

    c: list = field(default_factory=lambda: [0] * 8)
    d: list = field(default_factory=lambda: [0] * 8)
    x: list = field(default_factory=lambda: list(X))
    out: list = field(default_factory=lambda: [-9] * 8)

    def run(self, statement: str) -> None:
        scope = {"N": _Network(self), "T": _Tile(self), "x": _Places(self.x), "n": 0, "me": 0, "run": 2}
        scope |= {"c": _Places(self.c), "d": _Places(self.d), "square": lambda v: v * v}
        scope["out"] = _Places(self.out)
        tree = _IndexFirst().visit(ast.parse("\n".join(_block(statement))))
        exec(compile(ast.fix_missing_locations(tree), statement, "exec"), scope)


class _IndexFirst(ast.NodeTransformer):
    """`a[i] = v` evaluates i before v, as tilelang does, and not after it, as Python does."""

    def visit_Assign(self, node):
        target = node.targets[0]
        if not isinstance(target, ast.Subscript):
            return node
        store = ast.Attribute(target.value, "__setitem__", ast.Load())
        target.value.ctx = ast.Load()
        return ast.Expr(ast.Call(store, [target.slice, node.value], []))


class _Place(int):
    """An element: its value, and where it is."""

    def __new__(cls, values, index):
        place = super().__new__(cls, values[index])
        place.values, place.index = values, index
        return place

    def add(self, amount) -> int:
        old = self.values[self.index]
        self.values[self.index] = old + int(amount)
        return old


class _Places:
    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return _Place(self.values, index)

    def __setitem__(self, index, value):
        self.values[index] = int(value)


class _Network:
    def __init__(self, reference):
        self.reference = reference

    def atomic_add(self, place, amount, pe):
        return place.add(amount)

    def ld(self, place):
        return int(place.values[place.index])

    def st(self, place, value):
        place.values[place.index] = int(value)

    def put_value(self, place, value, pe):
        place.values[place.index] = int(value)


class _Tile:
    def __init__(self, reference):
        self.max, self.min, self.abs = max, min, abs
        self.shfl_sync = self.shfl_xor = self.shfl_up = self.shfl_down = lambda value, *lane_and_mask: int(value)
        # Of one lane.
        self.any_sync = self.all_sync = self.ballot_sync = lambda predicate, mask: int(predicate)
        self.match_any_sync = self.match_all_sync = lambda value, mask: mask
        self.activemask = lambda: 1
        self.cast = lambda value, dtype: value

    def atomic_add(self, place, amount, return_prev):
        return place.add(amount)

    def serial(self, *extent):
        return range(*extent)

    unroll = serial
