"""A layer's experts as users call them (`ops.moe_experts`), in bfloat16 and FP8, and each of its steps alone.

    GPUS=4 bash launch.sh benchmark/moe_experts.py
    GPUS=4 bash launch.sh benchmark/moe_experts.py --experts 256 --topk 8 --inner 2048 --tokens 4096 --dtypes fp8 --training

Dispatch, GEMM, SwiGLU, GEMM and combine, sequential and overlapped: GEMMs overlap with the dispatch and the combine,
which have `--blocks` SMs. The shape is DeepSeek-V4-Pro's: 384 experts, top-6, hidden 7168, inner 3072. `--training`
times forward and backward, and backward alone, next to plain torch between a dispatch and a combine (bfloat16);
matrices of bfloat16 get gradients. A start with
TSN_TRACE=FILE, few tokens and `--repeat 2` leaves a timeline of all ranks.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilescale_net as tsn
from benchmark.common import compiled
from benchmark.common.arguments import on_gpu, one_of
from benchmark.common.gemm import difference, if_works
from benchmark.common.measuring import Timer, gather, medians, normal_numbers, raise_if_wrong
from benchmark.common.modules import moe, p2p, torch
from benchmark.common.moe import LayerParser, all_inputs, begin_layers
from benchmark.common.report import Column, Report, us, world_size
from tilescale_net.cli.arguments import writable_file

BENCH = dict(ranks=0, quick="--repeat 2")  # see common/suite.py

ON_GPU = dict(tokens=[128, 512, 2048, 8192], hidden=7168, inner=3072, experts=384, topk=6)
SIMULATED = dict(tokens=[24], hidden=512, inner=64, experts=4, topk=2)
STEPS = {"dispatch": "dispatch", "up": "GEMM up", "swiglu": "SwiGLU", "down": "GEMM down", "combine": "combine"}


def parse() -> argparse.Namespace:
    parser = LayerParser(__doc__.splitlines()[0], ON_GPU if on_gpu() else SIMULATED, [16, 24])
    parser.option("--dtypes", one_of("bf16", "fp8"), ["fp8", "bf16"], "of rows and matrices")
    parser.option(
        "--table",
        writable_file,
        None,
        "write the table by which the operators choose to FILE; of several --blocks the last",
        "FILE",
    )
    parser.flag("--training", "forward and backward, and backward alone; matrices of bfloat16 get gradients")
    return parser.parse_args()


def options_of(args: argparse.Namespace, tokens: int, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the AllToAll: room for a quarter more rows than an even spread has, and for the gaps."""
    rows, local = 128 if on_gpu() else 32, args.experts // world_size()
    even = tokens * args.topk * 5 // 4 + 64
    capacity = -(-(even + local * rows) // rows) * rows
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    sizes = args.experts, tokens, args.hidden, args.topk, kind
    return sizes, dict(alignment=rows, tile_rows=rows, capacity=capacity)


class Experts:
    """This rank's matrices, [n, k] of each expert; any rank can make any expert's. `given`: as `ops.moe_experts`
    takes them. scales: with them, or None."""

    def __init__(self, args: argparse.Namespace, dtype: str, local: range) -> None:
        from tilescale_net.kernels.fused.scaled_gemm import quantise_weights

        self._args, self._dtype = args, dtype
        shapes = (2 * args.inner, args.hidden), (args.hidden, args.inner)
        self.given, scales = [], []
        for which, (n, k) in enumerate(shapes):
            kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
            held = torch.empty((len(local), n, k), dtype=kind, device=tsn.device())
            blocks = torch.empty((len(local), -(-n // 128), -(-k // 128)), device=tsn.device())
            for i, e in enumerate(local):
                if dtype == "fp8":
                    held[i], blocks[i] = quantise_weights(self.exact(e, which))
                else:
                    held[i] = self.exact(e, which)
            self.given.append(held.transpose(1, 2))
            scales.append(blocks)
        self.scales: Any = tuple(scales) if dtype == "fp8" else None

    def exact(self, expert: int, which: int) -> Any:
        """The first (0) or the second matrix [n, k] of an expert, bfloat16."""
        args = self._args
        n, k = ((2 * args.inner, args.hidden), (args.hidden, args.inner))[which]
        return normal_numbers((n, k), 2 * expert + which, torch.bfloat16, tsn.device()).div_(k**0.5)

    def of_token(self, x: Any, chosen: Any, weights: Any) -> Any:
        """A token's result, computed in float32 from the GEMMs' operands."""
        from tilescale_net.kernels.fused.scaled_gemm import dequantise_weights, quantise_weights
        from tilescale_net.kernels.moe.row_ops import dequantise, quantise
        from tilescale_net.ops import SwiGLU

        eight = self._dtype == "fp8"
        rounded = (lambda t: dequantise(*quantise(t))) if eight else (lambda t: t.float())
        total = torch.zeros(self._args.hidden, device=x.device)
        for e, weight in zip(chosen.tolist(), weights):
            up, down = (self.exact(e, which) for which in range(2))
            if eight:
                up, down = (dequantise_weights(*quantise_weights(w), torch.float32) for w in (up, down))
            h = SwiGLU()((rounded(x[None]) @ up.float().t()).bfloat16().float())
            total += weight * (rounded(h) @ down.float().t())[0]
        return total


def compile_all(layer: Any, experts: Experts, dtype: str, fused: bool) -> None:
    """Compile the kernels of a row at the same time, instead of one by one at their first calls. Collective."""
    from tilescale_net.kernels.fused import scaled_gemm
    from tilescale_net.kernels.fused.swiglu import SwiGLU, quantise_rows, swiglu, swiglu_quantised
    from tilescale_net.ops import expert_layer
    from tilescale_net.ops import experts as operators

    eight, device = dtype == "fp8", tsn.device()
    held, ways = experts.given, (["arriving"], ["combined"]) if fused else ([], [])
    h = torch.zeros((1, held[0].shape[2]), dtype=torch.bfloat16, device=device)
    calls: list[Callable[[], object]] = [p2p.meet, *(layer.kernels_of_tiles(weighted="rows") if fused else [])]
    if eight:
        x = torch.zeros((1, held[0].shape[1]), dtype=torch.bfloat16, device=device)
        calls += [lambda: quantise_rows(x), lambda: swiglu_quantised(h, SwiGLU())]
        for w in held:
            sizes = w.shape[0], w.shape[2], w.shape[1], "bfloat16", "block"
            usual = scaled_gemm.DEFAULT if on_gpu() else scaled_gemm.SIMULATED
            calls.append(functools.partial(scaled_gemm.kernel_of, *sizes, usual, device))
        gemms: list[Any] = [
            expert_layer.scaled_gemm_of(layer, w.transpose(1, 2), way == ["combined"])
            for w, way in zip(held, ways)
            if way
        ]
    else:
        calls.append(lambda: swiglu(h, SwiGLU()))
        ways = ["alone", *ways[0]], ["alone", *ways[1]]
        gemms = [operators.gemm_of(layer, w) for w in held]
    for gemm, w, way in zip(gemms, held, ways):
        calls += gemm.kernels(w, way)
    compiled.together(calls)


def steps_of(layer: Any, inputs: Any, experts: Experts, dtype: str, training: bool) -> dict[str, Callable[[], Any]]:
    """Each step alone, with its rows in the layer."""
    from tilescale_net.kernels.fused.expert_gradient import gradient_of_experts
    from tilescale_net.kernels.fused.scaled_gemm import scaled_matmul
    from tilescale_net.kernels.fused.swiglu import SwiGLU, quantise_rows, swiglu, swiglu_quantised
    from tilescale_net.kernels.moe.row_ops import zero_padding
    from tilescale_net.ops import experts as operators

    choices, kind = (inputs.topk_idx, inputs.topk_weights), SwiGLU()
    activation: Callable[[], Any]
    taken: Any
    eight, rows = dtype == "fp8", inputs.x
    received = layer.dispatch(quantise_rows(rows) if eight else rows, *choices)
    handle = received.handle
    ends = dict(counts=received.counts, offsets=received.offsets)
    if eight:
        taken = received.x.clone(), received.scales.clone()
        (up, down), (of_up, of_down) = (w.transpose(1, 2) for w in experts.given), experts.scales
        gemm_up = lambda: scaled_matmul(taken[0], up, taken[1], of_up, **ends)  # noqa: E731
        h = gemm_up()
        q, scales = swiglu_quantised(h, kind, **ends, cleared=False)
        gemm_down = lambda: scaled_matmul(q, down, scales, of_down, **ends)  # noqa: E731
        activation = lambda: swiglu_quantised(h, kind, **ends, cleared=False)  # noqa: E731
    else:
        taken, (up, down) = received.x.clone(), experts.given
        products = [operators.gemm_of(layer, w) for w in (up, down)]
        gemm_up = lambda: products[0](taken, up, handle)  # noqa: E731
        h = gemm_up()
        inner = swiglu(h, kind, **ends, cleared=False)
        gemm_down = lambda: products[1](inner, down, handle)  # noqa: E731
        activation = lambda: swiglu(h, kind, **ends, cleared=False)  # noqa: E731
    y = gemm_down()
    dispatch = lambda: layer.dispatch(quantise_rows(rows) if eight else rows, *choices)  # noqa: E731
    combine = lambda: layer.combine(y, handle)  # noqa: E731
    steps = dict(zip(STEPS, (dispatch, gemm_up, activation, gemm_down, combine)))
    if training and not eight:
        rows_of_up, of_h, inner_rows, of_y = (zero_padding(t, **ends, copied=True) for t in (taken, h, inner, y))
        steps["gradients"] = lambda: (  # in the memory order of matrices as torch.nn.Linear holds them
            gradient_of_experts(of_h, rows_of_up, **ends),
            gradient_of_experts(of_y, inner_rows, **ends),
        )
        if on_gpu():
            last = received.offsets[1:].clone()
            steps["torch_gradients"] = lambda: (
                torch._grouped_mm(of_h.t(), rows_of_up, offs=last),
                torch._grouped_mm(of_y.t(), inner_rows, offs=last),
            )
    if on_gpu() and not eight:
        offs = received.offsets[1:].clone()
        of_torch = lambda: (torch._grouped_mm(taken, up, offs=offs), torch._grouped_mm(inner, down, offs=offs))  # noqa: E731
        steps |= if_works("torch's grouped GEMM", lambda: of_torch)
    return steps


def of_torch(layer: Any, x: Any, choices: tuple[Any, Any], matrices: list[Any]) -> Any:
    """The layer of bfloat16 in plain torch between a dispatch and a combine, each with gradients."""
    from tilescale_net import ops

    received = ops.moe_dispatch(layer, x, *choices)
    ends = received.handle.plan.counts(layer.config.ranks, layer.config.local_experts)[1][1:].contiguous()
    gate, up = torch._grouped_mm(received.x, matrices[0], offs=ends).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    return ops.moe_combine(layer, torch._grouped_mm(inner, matrices[1], offs=ends), received)


def measure(
    args: argparse.Namespace, dtype: str, tokens: int, blocks: int, experts: Experts, timer: Timer, table: Any
) -> None:
    """A row. Collective."""
    from tilescale_net import ops

    sizes, options = options_of(args, tokens, dtype)
    options |= dict(tuning=moe.Tuning(blocks=blocks))
    layer = moe.AllToAll(*sizes, **options, warm_up=False)
    args_of_inputs = argparse.Namespace(**vars(args))
    everyone = all_inputs(args_of_inputs, tokens, False)
    mine, local = everyone[tsn.rank()], args.experts // tsn.size()
    rows = sum(int((e.topk_idx // local == tsn.rank()).sum()) for e in everyone)
    choices, most = (mine.topk_idx, mine.topk_weights), max(gather(rows))
    x, matrices = mine.x, experts.given
    if args.training:
        x = mine.x.clone().requires_grad_()
        matrices = [w.requires_grad_() if w.dtype == torch.bfloat16 else w for w in matrices]
    wanted_of = [t for t in (x, *matrices) if t.requires_grad]

    def forward(fused: bool) -> Any:
        return ops.moe_experts(layer, x, *choices, *matrices, scales=experts.scales, fused=fused)

    def differentiate(out: Any, grad: Any, retain: bool = False) -> list[Any]:
        """Gradients where an optimizer finds them: torch copies one whose strides are not its parameter's."""
        out.backward(grad, retain_graph=retain)
        found = [t.grad for t in wanted_of]
        for t in wanted_of:
            t.grad = None
        return found

    def call(run: Callable[[], Any]) -> None:
        out = run()
        if args.training:
            differentiate(out, out.detach())

    def backward_of(run: Callable[[], Any]) -> Callable[[], Any]:
        out = run()
        grad = out.detach().clone()
        return lambda: differentiate(out, grad, retain=True)

    # Of eight bits, GEMMs overlap if a row has a multiple of four scales.
    ways = {"ours": False} | ({"fused": True} if dtype == "bf16" or args.hidden % 512 == 0 else {})
    with torch.no_grad():
        compile_all(layer, experts, dtype, "fused" in ways)
        in_turn = forward(False)
        for token in range(2):
            wanted = experts.of_token(mine.x[token], mine.topk_idx[token], mine.topk_weights[token])
            label = f"moe_experts, {dtype}, {tokens} tokens"
            raise_if_wrong(label, difference(in_turn[token], wanted, f"token {token}", 0.08))
        if "fused" in ways:
            same = torch.equal(forward(True), in_turn)
            raise_if_wrong(label, None if same else "sums of overlapped and sequential calls differ")
        steps = steps_of(layer, mine, experts, dtype, args.training)
    runs: dict[str, Callable[[], Any]] = {name: functools.partial(forward, fused) for name, fused in ways.items()}
    backwards: dict[str, Callable[[], Any]] = {}
    if args.training:
        if dtype == "bf16" and hasattr(torch, "_grouped_mm"):
            runs["torch_layer"] = functools.partial(of_torch, layer, x, choices, matrices)
        backwards = {f"{name}_backward": backward_of(run) for name, run in runs.items()}
        found = {name: run()[0] for name, run in backwards.items()}
        exact = found["ours_backward"].float()
        for name, of_x in found.items():  # by the norm: a few of the elements are rounded badly
            error = float((of_x.float() - exact).norm() / exact.norm())
            complaint = f"the gradient of x by {name} differs from ours by {error:.3f} of its norm"
            raise_if_wrong(label, None if error <= 0.03 else complaint)
        del found, exact
    launches = {name: functools.partial(call, run) for name, run in runs.items()}
    slowest = timer.slowest(launches | backwards | steps, 3, set(launches | backwards) if args.training else set())
    times = medians(slowest)
    total, best = sum(times[name] for name in STEPS), min(times[name] for name in ways)
    flops = 6 * most * args.hidden * args.inner
    row: dict[str, Any] = dict(dtype=dtype, tokens=tokens, blocks=blocks, total=total, **times)
    row |= dict(over=times["fused"] / times["ours"] if "fused" in ways else None, tflops=flops / best / 1e6)
    row |= dict(gemm_tflops=flops / (times["up"] + times["down"]) / 1e6)
    table.add(row, slowest)
    if args.table and tsn.rank() == 0 and "fused" in ways:
        from benchmark.gemm_ways import table_with, text_of
        from tilescale_net.kernels.fused.choice import experts_problem

        problem = experts_problem(tsn.size(), tokens, args.topk, args.hidden, args.inner, sizes[-1])
        point = problem, {"fused": times["fused"], "unfused": times["ours"]}
        gpu = torch.cuda.get_device_name() if on_gpu() else "simulator"
        path = Path(args.table)
        path.write_text(text_of(table_with(path, gpu, [point], "moe_experts")))
    layer.check()
    layer.free()


def main() -> None:
    args = parse()
    report = Report("moe_experts", args)
    need = 0
    for dtype, tokens in itertools.product(args.dtypes, args.tokens):
        sizes, options = options_of(args, tokens, dtype)
        bytes_of = moe.AllToAll.heap_bytes(*sizes, ranks=world_size(), **options)
        if args.training and dtype == "fp8":
            bytes_of += moe.AllToAll.heap_bytes(*sizes[:-1], torch.bfloat16, ranks=world_size(), **options)
        need = max(need, bytes_of)
    passes = "forward and backward" if args.training else "forward"
    timer = begin_layers(args, report, need, f"{passes}, normal random data", 3)
    keys = [Column("dtype", "Dtype"), Column("tokens", "Tokens", ",d")]
    keys.append(Column("blocks", "Blocks", ",d", plotted=False))
    columns = [us("ours", "sequential"), us("fused", "overlapped"), Column("over", "overlapped, x", ".3f")]
    if args.training:
        columns += [us("torch_layer", "torch between dispatch and combine"), us("ours_backward", "backward")]
        columns += [us("fused_backward", "overlapped"), us("torch_layer_backward", "torch")]
        columns += [us("gradients", "gradients of matrices"), us("torch_gradients", "torch")]
    columns += [us("total", "steps together"), *(us(k, title) for k, title in STEPS.items())]
    columns += [us("torch", "torch grouped_mm, both"), Column("tflops", "TFLOP/s of the faster", ".0f")]
    table = report.table("moe_experts", keys, [*columns, Column("gemm_tflops", "TFLOP/s of GEMMs", ".0f")])
    table.plotted = False
    local = args.experts // tsn.size()
    for dtype in args.dtypes:
        experts = Experts(args, dtype, range(tsn.rank() * local, (tsn.rank() + 1) * local))
        for tokens, blocks in itertools.product(args.tokens, args.blocks):
            measure(args, dtype, tokens, blocks, experts, timer, table)
        del experts
    report.finish()


if __name__ == "__main__":
    main()
