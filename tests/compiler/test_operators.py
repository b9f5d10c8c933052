"""The operator table is validated when it is made, and every row is known to TVM as written."""

import pytest
import tilelang  # noqa: F401 (makes `tvm` importable)
import tvm
from tvm import tirx

from tilescale_net.compiler.lowering import device_call
from tilescale_net.compiler.operators import CHOICES, OPERATORS, PURE, Operator
from tilescale_net.compiler.toolchain import DEVICE_DIR
from tilescale_net.runtime import context


@pytest.mark.parametrize("name", OPERATORS)
def test_registration(name):
    operator = OPERATORS[name]
    op = tvm.ir.Op.get(operator.op_name)
    assert op.num_inputs == operator.arity
    assert int(op.get_attr("TCallEffectKind")) == operator.effect
    assert op.get_attr("TScriptPrinterName") == f"tsn_{name}"
    assert op.has_attr("cuda.FLowerIntrinsic")


def test_only_topology_primitives_are_pure():
    pure = {name for name, operator in OPERATORS.items() if operator.effect == PURE}
    assert pure == {"my_pe", "n_pes", "node_pe", "n_node_pes", "is_direct"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(name="a b"), "not an identifier"),
        (dict(name="a", template=("Colour",)), "'Colour' is neither 'int', 'text' nor one of"),
        (dict(name="a", args=("context", "blob")), "'blob' is not one of"),
        (dict(name="a", args=("pe", "context")), "the context must be the first"),
        (dict(name="a", result="float16"), "result 'float16' is not supported"),
        (dict(name="a", scope="grid"), "scope 'grid' is not one of"),
        (dict(name="a", acquires="all"), "acquires 'all' is not '', 'generic' or 'async'"),
        (dict(name="a", effect=2), "effect must be PURE or OPAQUE"),
        (dict(name="a", effect=PURE), "a pure operator without a result would be removed"),
    ],
)
def test_bad_rows(row, message):
    with pytest.raises(ValueError, match=message):
        Operator(**row)


def test_traced_operations_are_known():
    traced = [row for row in OPERATORS.values() if row.operation]
    assert {row.operation for row in traced} <= {*context.OPERATIONS, "range_begin", "range_end"}
    assert all(row.effect != PURE and row.arg_kinds[0] == "context" for row in traced)


@pytest.mark.parametrize(
    ("name", "accessed"),
    [
        ("put", [(1, 3), (2, 3)]),
        ("put_signal", [(1, 3), (2, 3), (5, None)]),
        ("put_shared", [(1, 3)]),
        ("put_value", [(1, None)]),
        ("put_vector", [(1, 3)]),
        ("put_vectors", [(1, 3)]),
        ("take_vectors", []),
        ("wait", [(1, None)]),
        ("ld", [(0, None)]),
        ("put_rows", []),  # the device function checks them
        ("remote", []),
    ],
)
def test_addresses_that_the_simulator_checks(name, accessed):
    assert OPERATORS[name].accessed == accessed


def i32(value):
    return tirx.IntImm("int32", value)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("flush_async", (), "tsn.flush_async takes 2 arguments, not 1"),
        ("flush_async", (i32(1), i32(2)), "tsn.flush_async takes 2 arguments, not 3"),
        ("flush_async", (tirx.IntImm("int64", 1),), "argument 'pe' has type int64 instead of int32"),
        ("wait", ("warp", "about", i32(0), i32(0), i32(0)), "'about' is not a Compare"),
    ],
)
def test_bad_calls(name, arguments, message):
    with pytest.raises(TypeError, match=message):
        OPERATORS[name](*arguments)


def test_arguments_are_read_and_replaced_by_name():
    row = OPERATORS["put_value"]
    call = row(tirx.Var("to", "handle"), tirx.Var("x", "float32"), i32(3))
    assert row.names == ("context", "memory", "value", "pe")
    assert int(row.read(call).pe) == 3 and int(row.read(row.replace(call, pe=i32(4))).pe) == 4
    assert "compare" in OPERATORS["atomic_cas"].names and OPERATORS["put"].names[:5] == (
        "scope", "engine", "unroll", "stages", "stage_bytes",
    )  # fmt: skip
    assert all(len(set(row.names)) == row.arity for row in OPERATORS.values())


def test_scopes_of_calls():
    fence = OPERATORS["fence"]
    assert fence.scope_of(fence("warp", i32(-1))) == "warp"
    assert OPERATORS["barrier_grid"].scope_of(OPERATORS["barrier_grid"]()) == "block"
    assert OPERATORS["barrier_all"].scope_of(OPERATORS["barrier_all"]("grid")) == "block"
    assert OPERATORS["flush_async"].scope_of(OPERATORS["flush_async"](i32(0))) == "thread"


def test_lowering_keeps_the_result_type():
    call = OPERATORS["flush_async"](i32(-1))
    lowered = device_call(OPERATORS["flush_async"], call)
    assert str(lowered.dtype) == "uint64" and lowered.args[0].value == "tsn::flush_async"


def test_choices_exist_in_the_device_headers():
    types = "".join(path.read_text() for path in DEVICE_DIR.glob("*.h"))
    for enumeration, choices in CHOICES.items():
        declared = types.split(f"enum class {enumeration} {{")[1].split("}")[0].replace(",", " ").split()
        assert set(choices.values()) <= set(declared), enumeration
