"""Time of all-reduce, residual and RMSNorm in one kernel, and the cost of FP8 output and of an MoE layer's end.

    GPUS=4 bash launch.sh benchmark/all_reduce_norm.py
    GPUS=4 bash launch.sh benchmark/all_reduce_norm.py --rows 1,128,2048 --forms bf16 --variants all
    GPUS=2 bash launch.sh benchmark/all_reduce_norm.py --rows 6,138 --hidden 6144 --forms bf16,fp8_128

Forms of a row count alternate with each other, so that differences to the BF16 form are of the same run. --variants
also times the BF16 form with one shot or two at any size, with two where no blocks share rows, and with and without
dependent launch.
The peers are NCCL's all-reduce with torch's addition and rms_norm, and FlashInfer's fusion of the same, skipped by name
if it is not installed. New residuals are compared bit by bit (FlashInfer's roughly), FP8 numbers with the BF16 form
quantised by torch. Without a GPU the simulator runs the same kernels alone.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, Report, medians, positive_int, us, world_size
from benchmark.common.arguments import CALLS, int_list, on_gpu, one_of
from benchmark.common.collectives import dependent_launch, nccl_group
from benchmark.common.measuring import Timer, common_seeds, normal_numbers, raise_if_wrong
from benchmark.common.modules import dist, row_ops, torch
from benchmark.common.peers import Made, Operands, Peer, flashinfer_fusion, made

BENCH = dict(ranks=0, quick="--rows 1,16 --repeat 2")  # see common/suite.py
EPS = 1e-6
# The form whose time is subtracted from the others'.
BASE = "bf16"


# FlashInfer's pattern of all-reduce, residual and RMSNorm.
RESIDUAL_AND_NORM = 1
FLASHINFER = (
    Peer("flashinfer_one_us", "FlashInfer one-shot", lambda case: case.flashinfer(True)),
    Peer("flashinfer_two_us", "FlashInfer two-shot", lambda case: case.flashinfer(False)),
)


# Other forms: names of the options, and in the table.
FORMS = {
    "in_place": "residual in place", "no_residual": "no residual", "weight_bias": "weight + 1", "fp8_tensor": "fp8 by tensor",
    "fp8_token": "fp8 by token", "fp8_128": "fp8 by 128", "fp8_tma": "fp8 by 128, tma", "fp8_ue8m0": "fp8 by 128, UE8M0", "both": "bf16 and fp8 by 128",
    "moe": "MoE, bf16", "moe_fp8": "MoE, fp8 by 128",
}  # fmt: skip
# Kernels of a form: granularity of scales, and whether a token's row is a sum of its experts' rows.
SCALED_BY = {"fp8_tensor": "tensor", "fp8_token": "token", "fp8_ue8m0": "ue8m0_packed"} | dict.fromkeys(
    ("fp8_128", "fp8_tma", "both", "moe_fp8"), "block"
)
FP8_FORMS = {FORMS[name] for name in SCALED_BY if name.startswith("fp8")}
# Variants of the BF16 form: (shots, blocks that share rows, dependent launch).
VARIANTS: dict[str, tuple[int | None, int | None, int | None]] = {
    "one_shot": (1, None, None), "two_shot": (2, None, None), "unshared": (2, 1, None),
    "independent": (None, None, 0), "dependent": (None, None, 1),
}  # fmt: skip

# Default shape between two GPUs, too: the one that vLLM publishes.
OF_TWO = (6144, [6, 138])
# Default rows, elements of a row and choices of a token.
ON_GPU = dict(rows=[1, 4, 16, 64, 128, 256, 512, 1024, 2048], hidden=8192, top_k=8)
IN_SIMULATOR = dict(rows=[1, 3], hidden=256, top_k=2)


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=CALLS, check=True)
    parser.option("--rows", int_list(1, 1 << 20), None, "rows (1 to 2048; in the simulator 1,3)")
    parser.option("--hidden", positive_int, None, "elements of a row (8192; in the simulator 256)")
    parser.option("--top-k", positive_int, None, "choices of a token, of the MoE forms (8; in the simulator 2)")
    parser.option("--forms", one_of(BASE, *FORMS), [BASE, *FORMS], f"{BASE} is always one")
    parser.option("--variants", one_of(*VARIANTS), [], f"of the form {BASE}")
    parser.flag("--no-nccl", "leave NCCL out")
    args = parser.parse_args()
    parser.require_two_ranks("a collective needs")
    more = [OF_TWO] if on_gpu() and world_size() == 2 and args.rows is None and args.hidden is None else []
    for name, value in (ON_GPU if on_gpu() else IN_SIMULATOR).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.hidden % 128:
        parser.error(f"--hidden is {args.hidden}; FP8 output by 128 needs a multiple of 128")
    args.shapes = [(args.hidden, args.rows), *more]
    return args


class NormCase:
    """The forms of one row count, on the same input."""

    def __init__(self, op: Any, rows: int, top_k: int) -> None:
        from tilescale_net.kernels.all_reduce_norm import ExpertRows

        (self._seed,) = common_seeds(1)
        self._op, self._rows, self._hidden = op, rows, op.hidden
        self.group: Any = None  # of the peers
        device, kind = tsn.device(), torch.bfloat16
        self._shape = rows, op.hidden
        self.x = self._data(tsn.rank())
        self.weight = normal_numbers((op.hidden,), self._seed + 999, kind, device)
        self.residual = normal_numbers(self._shape, self._seed + 998, kind, device)
        self.out, self.total, self._alone = (torch.empty_like(self.x) for _ in range(3))
        self._alone.zero_()
        self._fp8 = torch.empty(self._shape, dtype=torch.float8_e4m3fn, device=device)
        self._scale = torch.full((1,), 1 / 64, device=device)
        self._scales = {
            (by, way): op.new_scales(rows, by, way)
            for by, way in (("token", "row"), ("block", "row"), ("block", "tma"), ("ue8m0_packed", "tma"))
        }
        order = torch.arange(rows * top_k, dtype=torch.int32, device=device).view(rows, top_k)
        self._experts = ExpertRows(
            normal_numbers((rows * top_k, op.hidden), self._seed + tsn.rank(), kind, device),
            order.flip(0).contiguous(),
            torch.full((rows, top_k), 1 / top_k, device=device),
            self.x,
        )

    def _data(self, rank: int) -> Any:
        return normal_numbers(self._shape, self._seed + 7 * rank, torch.bfloat16, tsn.device())

    def _call(self, out: Any, x: Any = None, op: Any = None, **more: Any) -> Callable[[], object]:
        options = dict(residual=self.residual, total=self.total, eps=EPS) | more
        op = op or self._op
        return lambda: op(out, self.x if x is None else x, self.weight, **options)

    def variant(self, op: Any) -> Callable[[], object]:
        """The BF16 form of another object."""
        return self._call(self.out, op=op)

    def forms(self, names: Sequence[str]) -> dict[str, Callable[[], object]]:
        """The BF16 form and the forms of these names."""
        fp8, block = dict(quantized=self._fp8), self._scales["block", "row"]
        calls = {
            BASE: self._call(self.out),
            "residual in place": lambda: self._op(self.out, self.x, self.weight, residual=self._alone, eps=EPS),
            "no residual": self._call(self.out, residual=None),
            "weight + 1": self._call(self.out, weight_bias=1.0),
            "fp8 by tensor": self._call(None, **fp8, scale=self._scale),
            "fp8 by token": self._call(None, **fp8, scales=self._scales["token", "row"]),
            "fp8 by 128": self._call(None, **fp8, scales=block),
            "fp8 by 128, tma": self._call(None, **fp8, scales=self._scales["block", "tma"]),
            "fp8 by 128, UE8M0": self._call(None, **fp8, scales=self._scales["ue8m0_packed", "tma"]),
            "bf16 and fp8 by 128": self._call(self.out, **fp8, scales=block),
            "MoE, bf16": self._call(self.out, self._experts),
            "MoE, fp8 by 128": self._call(None, self._experts, **fp8, scales=block),
        }
        wanted = {BASE, *(FORMS[name] for name in names if name != BASE)}
        return {name: call for name, call in calls.items() if name in wanted}

    def nccl(self, group: Any) -> Callable[[], object]:
        y = self.x.clone()

        def call() -> None:
            dist.all_reduce(y, group=group)
            torch.nn.functional.rms_norm(y + self.residual, (self._hidden,), self.weight, EPS)

        return call

    def flashinfer(self, one_shot: bool) -> Made:
        """Its result, a new residual and a norm, is compared at once; RuntimeError if it is wrong."""
        total, norm = torch.zeros_like(self.x), torch.zeros_like(self.x)
        call = flashinfer_fusion(
            Operands(self.x, norm, self.group), *self._shape, one_shot, pattern_code=RESIDUAL_AND_NORM,
            residual_in=self.residual, residual_out=total, norm_out=norm, rms_gamma=self.weight, rms_eps=EPS,
        )  # fmt: skip
        call()
        wanted = self._total()
        rows = torch.nn.functional.rms_norm(wanted.float(), (self._hidden,), self.weight.float(), EPS)
        for found, right in ((total, wanted.float()), (norm, rows)):
            if not torch.allclose(found.float(), right, rtol=0.05, atol=0.05):
                raise RuntimeError("its result is wrong")
        return Made(call)

    def _total(self) -> Any:
        """The new residual."""
        sums = torch.zeros(self._shape, dtype=torch.float32, device=self.x.device)
        for rank in range(tsn.size()):
            sums += self._data(rank).float()
        return (sums.to(torch.bfloat16).float() + self.residual.float()).to(torch.bfloat16)

    def check(self, calls: dict[str, Callable[[], object]]) -> str | None:
        """The error of results, or None."""
        total = self._total()
        normed = torch.nn.functional.rms_norm(total.float(), (self._hidden,), self.weight.float(), EPS)
        for name in (name for name in calls if name in VARIANTS or name == BASE):
            self.total.zero_()
            self.out.zero_()
            calls[name]()
            if not torch.equal(self.total, total):
                return f"{name}: {int((self.total != total).sum())} of {total.numel()} new residuals are wrong"
            if not torch.allclose(self.out.float(), normed, rtol=0.02, atol=0.01):
                return f"{name}: normalised rows are wrong"
        wanted, scales = row_ops.quantise(self.out)
        for name in ("fp8 by 128", "fp8 by 128, tma"):
            if name not in calls:
                continue
            calls[name]()
            found = self._scales["block", "tma" if "tma" in name else "row"]
            if not torch.equal(found, scales) or not torch.equal(self._fp8.view(torch.uint8), wanted.view(torch.uint8)):
                return f"{name}: not equal to the BF16 form quantised by torch"
        return None


def main() -> None:
    args = parse()
    report = Report("all_reduce_norm", args)
    world = tsn.init(((256 if args.hidden > 1024 else 96) + 64 * len(args.variants)) << 20)
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    report.environment |= {
        "rows": f"{', '.join(str(hidden) for hidden, _ in args.shapes)} elements of bfloat16", "data": "not verified" if args.no_check else "verified",
        "timing": timer.label() + ", slowest rank",
    }  # fmt: skip
    columns = [us("us", "Time"), us("more_us", f"More than {BASE}", plotted=False)]
    if group is not None:
        columns += [us("nccl_us", "NCCL, then norm"), *(us(peer.key, peer.title) for peer in FLASHINFER)]
    keys = [Column("rows", "Rows", ",d"), Column("form", "Form")]
    keys = [Column("hidden", "Hidden", ",d"), *keys] if len(args.shapes) > 1 else keys
    table = report.table("all_reduce_norm", keys, columns)
    from tilescale_net.kernels.all_reduce_norm import AllReduceNorm

    kernels = {(SCALED_BY.get(name, ""), args.top_k if "moe" in name else 0) for name in args.forms} | {("", 0)}

    def make(hidden: int) -> Any:
        if not timer.on_gpu:
            return AllReduceNorm(hidden, threads=64, blocks=2)
        op = AllReduceNorm(hidden)
        op.compile(torch.bfloat16, sorted(kernels))
        return op

    largest_more = 0.0
    cases = [(hidden, rows) for hidden, many in args.shapes for rows in many]
    op: Any = None
    others: dict[str, Any] = {}
    made_for = 0
    for hidden, rows in report.progress(cases, "rows", lambda case: f"{case[1]} of {case[0]}"):
        if hidden != made_for:
            for one in others.values() if op is None else (op, *others.values()):
                one.free()
            op, others, made_for = make(hidden), {}, hidden
            for name in args.variants:
                with dependent_launch(VARIANTS[name][2]):
                    others[name] = make(hidden)
        case = NormCase(op, rows, args.top_k)
        calls = case.forms(args.forms)
        for name, other in others.items():
            other.shots, other.spread, dependent = VARIANTS[name]
            calls[name] = case.variant(other)
            with dependent_launch(dependent):
                calls[name]()  # its kernel is made, if it is the first of its kind
        for call in calls.values():
            call()
        raise_if_wrong(f"{rows} rows of {hidden}", None if args.no_check else case.check(calls))
        if group is not None:
            calls["nccl_us"], case.group = case.nccl(group), group
            for peer in FLASHINFER:
                found = made(peer, case)
                if isinstance(found, str):
                    report.environment.setdefault(peer.title, f"not everywhere; {found}")
                else:
                    calls[peer.key] = found.run
        tsn.barrier()
        samples = timer.slowest(calls, 20)
        times = medians(samples)
        peers = {name: time for name, time in times.items() if name in {column.key for column in columns}}
        for name in (name for name in calls if name not in peers):
            row = {
                "hidden": hidden,
                "rows": rows,
                "form": name,
                "us": times[name],
                "more_us": times[name] - times[BASE],
            }
            table.add(row | peers, {"us": samples[name]})
            if name in FP8_FORMS:
                largest_more = max(largest_more, row["more_us"])
        tsn.barrier()
    if FP8_FORMS & {FORMS.get(name) for name in args.forms}:
        table.notes.append(f"FP8 output costs at most {largest_more:.2f} us more than {BASE}.")
    for one in (op, *others.values()) if op is not None else ():
        one.free()
    report.finish()


if __name__ == "__main__":
    main()
