"""Throughput mode on the host: buffers, and the launches of its kernels.

`NodeThroughputMode` is for rows that cross the network once per node: other buffers and kernels, the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name, wait_until_resident
from tilescale_net.kernels.moe.checks import CombineCall, DispatchCall, Phase
from tilescale_net.kernels.moe.combine import combine_throughput, sum_combined
from tilescale_net.kernels.moe.config import FP8_DTYPE, Config, Tuning, as_words, shares
from tilescale_net.kernels.moe.dispatch import dispatch_throughput
from tilescale_net.kernels.moe.handle import Dispatched, DispatchedByPlan, Handle, Pending, Plans, RoutingPlan
from tilescale_net.kernels.moe.layout import (
    NO_FAULT,
    CountsLayout,
    NodeLayout,
    NodePlanOffsets,
    NodeSizes,
    PlanOffsets,
    most_sent,
    output_tag,
    record_words,
    with_room,
)
from tilescale_net.kernels.moe.mode import DeferredStream, Launch, Mode, OverNodes, SideStream
from tilescale_net.kernels.moe.routing import plan_nodes, plan_routing
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.kernels.moe.tiles import Tiles
from tilescale_net.runtime.launch_args import launch_argument

if TYPE_CHECKING:
    from tilescale_net.kernels.moe.all_to_all import AllToAll


def placement_of(config: Config) -> str:
    """See dispatch_throughput."""
    return "rank" if config.layout == "rank" else "expert" if config.zero_copy else "staged"


def output_rows(config: Config) -> int:
    """Rows of dispatch's output. A rank has at least one expert-major row for each rank-major row."""
    return rows_received(config) if config.layout == "rank" else config.capacity


def rows_received(config: Config) -> int:
    """Rank-major rows that a rank receives at most."""
    return min(config.ranks * config.max_tokens, config.capacity)


def shared_rows(config: Config, proxied: bool) -> dict[str, tuple[str, int, int, torch.dtype]]:
    """Buffers of rows: "kernel.parameter" -> (memory region, rows, columns, dtype). Between nodes a dispatch and a combine
    share regions of as many rows as a rank sends and receives. A call fills them when all ranks have begun it, and so have
    ended the previous one."""
    c, placement = config, placement_of(config)
    sent, received = most_sent(c.ranks, c.max_tokens, c.top_k), rows_received(c)
    payload = FP8_DTYPE if c.quantize_combine else c.combine_dtype
    arrivals = placement == "staged" or (proxied and placement == "expert")
    return {
        "dispatch.arrival": ("received", received if arrivals else 1, c.row_words, torch.int32),
        "dispatch.staged": ("sent", sent if proxied else 1, c.row_words, torch.int32),
        "combine.slots": ("sent", sent, c.hidden, payload),
        "combine.staged": ("received", received if proxied else 1, c.hidden, payload),
    }


def symmetric_buffers(config: Config, tuning: Tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    counts, W, placement = CountsLayout(c.num_experts, R), record_words(c.top_k), placement_of(c)
    scales, G, chunks = max(c.scale_words, 1), groups_of(c.hidden), -(-M // tuning.chunk)
    own = output_rows(c) if placement != "staged" else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    shared = shared_rows(config, proxied)
    rows = {name: count for name, (_, count, _, _) in shared.items()}
    memory = {"sent": 0, "received": 0}
    for region, count, columns, dtype in shared.values():
        memory[region] = max(memory[region], count * columns * dtype.itemsize // 4)

    def scaled(rows: int) -> int:
        return rows if c.scale_words else 1

    def quantised(rows: int) -> int:
        return rows if c.quantize_combine else 1

    return {
        "routing.counts_out": ((counts.words,), ints),
        "routing.counts_in": ((R, counts.words), ints),
        "routing.records_out": ((R, M, W), ints),
        "routing.records_in": ((R, M, W), ints),
        "routing.counts_ready": ((R,), words),
        "routing.records_ready": ((R,), words),
        "routing.blocks_ready": ((1,), words),
        "output.rows": ((own, c.hidden), c.dtype),
        "output.scales": ((scaled(own), scales), floats),
        "rows.sent": ((memory["sent"],), ints),
        "rows.received": ((memory["received"],), ints),
        "dispatch.arrival_scales": ((scaled(rows["dispatch.arrival"]), scales), ints),
        "dispatch.staged_scales": ((scaled(rows["dispatch.staged"]), scales), ints),
        "dispatch.ready": ((R,), words),
        "dispatch.arrived": ((R, chunks), words),
        "dispatch.done": ((R,), words),
        **({"dispatch.counted": ((c.tiles + 1,), words)} if c.tiles else {}),
        "combine.slot_scales": ((quantised(rows["combine.slots"]), G), floats),
        "combine.slot_values": ((rows["combine.slots"], c.top_k), floats),
        "combine.staged_scales": ((quantised(rows["combine.staged"]), G), floats),
        "combine.staged_values": ((rows["combine.staged"], c.top_k), floats),
        "combine.ready": ((R,), words),
        "combine.arrived": ((R, chunks), words),
        "combine.done": ((R,), words),
    }


def new_scales(config: Config, device: torch.device, by_column: bool = False) -> torch.Tensor:
    """Memory for the scales of an output, [rows, scale_words]."""
    shape = output_rows(config), config.scale_words
    new = torch.empty(shape[::-1] if by_column else shape, dtype=torch.float32, device=device)
    return new.t() if by_column else new


def copy_output(targets: tuple, sources: tuple) -> None:
    """Copy rows and scales to the caller's; None without scales."""
    for target, source in zip(targets, sources):
        if target is not None:
            target.copy_(source)


# The arguments of a call to a launch, in this order; the fields of RoutingPlan but node_plan last.
_PLAN = ("send_token", "send_row", "token_slot", "records", "totals", "row_index", "row_weight")
_ROUTING = ("topk_idx", "topk_weights", "tokens", "fault", "fault_value", *_PLAN)
DISPATCH = ("x", "x_scales", "out", "out_scales", "tag", "send_token", "send_row", "records", "totals")
COMBINE = (
    "y", "row_weight", "row_values", "bias_0", "bias_1", "out", "out_values", "tag", "tokens", "token_slot", "records", "totals"
)  # fmt: skip
_AWAITED = ("finished", "product_calls", "growth")  # the last arguments, with tiles
SUMS = ("y", "row_weight", "bias_0", "bias_1", "out", "tokens", "token_slot", "records", "totals")


class ThroughputMode(Mode):
    """Many tokens: a routing plan is agreed before rows move; send phases run on a stream of their own."""

    dispatch_takes: tuple[str, ...] = DISPATCH
    combine_takes: tuple[str, ...] = COMBINE
    tiles: Tiles | None = None  # of dispatched rows

    def __init__(self, base: AllToAll, config: Config, specs: BufferSpecs | None = None):
        super().__init__(base, config, specs or symmetric_buffers(config, base.tuning, base.proxied))
        R, c, tuning, device = config.ranks, config, base.tuning, base.device
        self._tuning, self._proxied = tuning, base.proxied
        # Calls that share memory must run in order.
        ordered = self._shares_rows
        self._stream = SideStream(device, ordered) if device.type == "cuda" else DeferredStream(ordered)
        self.placement = placement_of(c)
        self._in_place = self.placement != "staged"  # rows arrive in the output instead of a buffer
        self.symmetric_output = config.zero_copy
        output = self._buffers("output")
        self._output = output["rows"], output["scales"] if c.scale_words else None
        self._landing = tuple(launch_argument(as_words(output[name], 0)) for name in ("rows", "scales"))
        self._own_tag = output_tag(base.heap_offset(output["rows"])) if self._in_place else 0
        self._chunks = -(-c.max_tokens // tuning.chunk)
        self._loaded: set[tuple] = set()  # keys of launched combines that begin late

        # Local words.
        shared = {"active": base.active, "status": base.status.tensor}
        words = CountsLayout(c.num_experts, R).words + (c.num_experts if c.tiles else 0)
        partial = torch.zeros((base.blocks, words), dtype=torch.int32, device=device)
        if c.tile_rows is not None:
            calls = torch.zeros(1, dtype=torch.int64, device=device)
            self.tiles = Tiles(c.tile_rows, self._symmetric["dispatch.counted"], calls, c.tile_rows, base.blocks)
        self._constants = {"routing": self._buffers("routing") | shared | {"partial": partial}}
        self._tickets = torch.zeros((2, 2, 2), dtype=torch.int32, device=device)
        for kernel, tickets in zip(("dispatch", "combine"), self._tickets):
            self._constants[kernel] = self._buffers(kernel) | self._rows_of(kernel) | shared | {"tickets": tickets}
        self._constants["combine"]["current"] = torch.zeros(1, dtype=torch.uint64, device=device)
        for constants in self._constants.values():
            constants["calls"] = base.counters(base.blocks)
        self._plans = self._new_plans()
        # Placeholders for empty and unused tensors.
        self._no_words = torch.zeros((1, c.row_words), dtype=torch.int32, device=device)
        self._no_scales = torch.zeros((1, max(c.scale_words, 1)), dtype=torch.int32, device=device)
        self._no_row = torch.zeros((1, c.hidden), dtype=c.combine_dtype, device=device)
        self._no_values = torch.zeros((1, c.top_k), dtype=torch.float32, device=device)

    @property
    def _puts_staged(self) -> bool:  # rows of a dispatch sent straight to ranks of other nodes
        return self._proxied

    @property
    def _shares_rows(self) -> bool:  # by dispatch and combine, see shared_rows
        return self._proxied

    def _rows_of(self, kernel: str) -> dict[str, torch.Tensor]:
        """Views of a kernel's buffers of rows, by parameter name."""
        views = {}
        for name, (region, rows, columns, dtype) in shared_rows(self._c, self._proxied).items():
            words = self._symmetric[f"rows.{region}"][: rows * columns * dtype.itemsize // 4]
            if name.startswith(f"{kernel}."):
                views[name.removeprefix(f"{kernel}.")] = words.view(dtype).view(rows, columns)
        return views

    def reset(self) -> None:
        super().reset()
        self._tickets.zero_()
        if self.tiles:
            self.tiles.reset()
        self._stream.forget()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], object]]:
        by_rank, base = self._c.layout == "rank", self._base
        ordinary: list[Callable[[], object]] = [
            partial(self._routing_of, "int64", base.blocks),
            partial(self._dispatch_launch, base.blocks),
            partial(self._combine_of, base.blocks, "" if by_rank else "choices"),
        ]
        if not everything:
            return ordinary
        return [
            *ordinary,
            partial(self._routing_of, "int32", base.blocks),
            partial(self._combine_of, base.blocks, "", "rows"),
            *([partial(self._combine_of, base.blocks, "", "choices")] if by_rank else []),
            *(partial(self._combine_of, base.blocks, weighted) for weighted in (() if by_rank else ("", "rows"))),
            *(self.variants_of_tiles(base.blocks, base.blocks_beside_gemm, "choices")[2:4] if self.tiles else []),
        ]

    def variants_of_tiles(self, blocks: int, combine_blocks: int, weighted: str) -> list[Callable[[], object]]:
        """Kernels of calls beside GEMMs, with tiles: a dispatch on `blocks` blocks, a combine on `combine_blocks`."""
        assert self.tiles is not None
        return [
            partial(self._routing_of, "int64", blocks),
            partial(self._dispatch_launch, blocks),
            partial(self._combine_of, combine_blocks, weighted, tiles=self.tiles.count),
            partial(self._sums_of, weighted, 0),
            wait_until_resident,
            partial(self._combine_of, self._base.blocks, weighted),
        ]

    def _fewer(self, blocks: int, kernel: str = "") -> dict[str, int]:
        """Options of kernels on fewer blocks than the tuning's."""
        absent = self._base.blocks - blocks
        senders = {"absent_senders": self._senders_of(kernel) - self._senders_of(kernel, blocks)} if kernel else {}
        return {"absent": absent} | senders if absent else {}

    def _senders_of(self, kernel: str, blocks: int | None = None) -> int:
        """Number of blocks of a dispatch or combine that send; default: the tuning's."""
        blocks = blocks or self._base.blocks
        dispatch, combine = shares(self._tuning, blocks)
        return combine if kernel == "combine" else blocks if self.placement == "rank" else dispatch

    def _route(self, kernel: str) -> dict[str, Any]:
        """Options of a kernel for nodes and their forwarders."""
        return {}

    def _routing_of(self, index_dtype: str, blocks: int) -> Callable[..., None]:
        return self._launch(self._new_routing, index_dtype, blocks)

    def _new_routing(self, index_dtype: str, blocks: int) -> Launch:
        c, base = self._c, self._base
        kernel = plan_routing(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.capacity, c.alignment, blocks, base.threads, index_dtype,
            **self._fewer(blocks), **self._route("routing"), **({"ordered": True} if c.tiles else {}),
        )  # fmt: skip
        return Launch(kernel, self._constants["routing"], _ROUTING, base.world)

    def _dispatch_launch(self, blocks: int) -> Callable[..., None]:
        return self._launch(self._new_dispatch, blocks)

    def _new_dispatch(self, blocks: int) -> Launch:
        c, base, t, senders = self._c, self._base, self._tuning, self._senders_of("dispatch", blocks)
        kernel = dispatch_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, self.placement,
            self._puts_staged, t.chunk, self._proxied_chunk(c.row_bytes), senders, blocks - senders, base.threads,
            **self._fewer(blocks, "dispatch"), **self._in_tiles(c.tiles), **self._route("dispatch"),
        )  # fmt: skip
        return Launch(kernel, self._constants["dispatch"], self.dispatch_takes, base.world, **self._forms("dispatch"))

    def _in_tiles(self, tiles: int) -> dict[str, int | None]:
        """Options of kernels that count tiles or wait for them."""
        return {"tile_rows": self._c.tile_rows, "tiles": tiles} if tiles else {}

    def _combine_of(
        self, blocks: int, weighted: str, valued: str = "", biases: int = 0, tiles: int = 0
    ) -> Callable[..., None]:
        return self._launch(self._new_combine, blocks, weighted, valued, biases, *([tiles] if tiles else []))

    def _new_combine(self, blocks: int, weighted: str, valued: str, biases: int, tiles: int = 0) -> Launch:
        c, base, t, senders = self._c, self._base, self._tuning, self._senders_of("combine", blocks)
        payload = FP8_DTYPE if c.quantize_combine else c.combine_dtype
        if tiles:  # all blocks send
            senders = blocks = min(blocks, self._senders_of("combine"))
        kernel = combine_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), c.layout == "rank",
            weighted, c.quantize_combine, valued, biases, self._proxied, t.chunk,
            self._proxied_chunk(c.hidden * payload.itemsize), senders, blocks - senders, t.combine_threads,
            **self._fewer(blocks, "combine"), **self._in_tiles(tiles), **self._route("combine"),
        )  # fmt: skip
        parameters = (*self.combine_takes, *(_AWAITED if tiles else ()))
        return Launch(kernel, self._constants["combine"], parameters, base.world, **self._forms("combine"))

    def _sums_of(self, weighted: str, biases: int) -> Callable[..., None]:
        return self._launch(self._new_sums, weighted, biases)

    def _new_sums(self, weighted: str, biases: int) -> Launch:
        c, base, t = self._c, self._base, self._tuning
        payload = FP8_DTYPE if c.quantize_combine else c.combine_dtype
        kernel = sum_combined(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), weighted, c.quantize_combine,
            biases, self._proxied, t.chunk, self._proxied_chunk(c.hidden * payload.itemsize), base.all_blocks, t.combine_threads,
        )  # fmt: skip
        return Launch(kernel, self._constants["combine"], SUMS, base.world, **self._forms("combine"))

    def _forms(self, kernel: str) -> dict[str, Any]:
        """Dtypes as which a kernel takes tensors, see `Launch`."""
        if kernel == "combine":
            nothing = dict.fromkeys(("y", "bias_0", "bias_1", "out"), self._no_row)
            return {"placeholders": nothing | {"out_values": self._no_values}}
        row, scales = self._c.row_words, max(self._c.scale_words, 1)
        return {
            "words": {"x": row, "x_scales": scales, "out": row, "out_scales": scales},
            "placeholders": {"x": self._no_words, "x_scales": self._no_scales, "out_scales": self._no_scales},
        }

    def _proxied_chunk(self, row_bytes: int) -> int:
        """Rows of a message to another node: large enough for the fabric's bandwidth, small enough to overlap."""
        t = self._tuning
        return max(t.chunk, min(t.proxied_bytes // row_bytes, -(-self._c.max_tokens // 4)))

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def output_shape(self) -> tuple[int, int]:
        return output_rows(self._c), self._c.hidden

    def _default_output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales for a dispatch without `out`."""
        return self._output if self.symmetric_output else self.new_output()

    def dispatch(self, call: DispatchCall) -> Pending:
        if self.tiles:
            self.tiles.next_call()
        if call.phase is Phase.WHOLE:
            return self._dispatch(call)
        choices = call.choices
        tensors = [
            call.x,
            call.scales,
            *(() if isinstance(choices, Handle) else (choices.topk_idx, choices.topk_weights)),
        ]
        with self._stream.on_side([t for t in tensors if t is not None]) as event:
            pending = self._dispatch(call)
        pending.rest = event
        return pending

    def usual_dispatch(self, tokens: int, x: Any, topk_idx: Any, topk_weights: Any, totals: Any = None) -> Dispatched:
        if not self._lands_whole:
            return super().usual_dispatch(tokens, x, topk_idx, topk_weights)
        launches = self._usual.get(topk_idx.dtype)
        if launches is None:
            blocks = self._base.blocks
            launches = self._routing_of(dtype_name(topk_idx.dtype), blocks), self._dispatch_launch(blocks)
            self._usual[topk_idx.dtype] = launches
        plan = self._plans.next(tokens)
        self._stream.launch(launches[0], topk_idx, topk_weights, tokens, NO_FAULT, 0, *plan.arguments[1:])
        self._stream.launch(launches[1], x, None, *self._landing, self._own_tag, *self._moved_by(plan))
        handle = Handle(self._signature, plan, self._base.membership)
        return DispatchedByPlan(*self._output, handle, self._c.layout == "rank")

    @property
    def _lands_whole(self) -> bool:
        """Whether a dispatch without `out` is a routing and one kernel that leaves the rows in symmetric memory."""
        return self.symmetric_output and not self.tiles and not self._c.column_scales

    def _dispatch(self, call: DispatchCall) -> Pending:
        c, x, out = self._c, call.x, call.out
        if isinstance(call.choices, Handle):
            handle = call.choices
        else:
            handle = Handle(self._signature, self._plan_routing(call), self._base.membership, call.choices.dropped)
        if call.fault is not None:
            tag = call.fault.code
        else:
            tag = (
                self._own_tag
                if out is None or not self.symmetric_output
                else output_tag(self._base.heap_offset(out[0]))
            )
        rows, row_scales = self._default_output() if out is None else out
        copied = self._in_place and not self.symmetric_output
        landing = self._landing if copied or rows is self._output[0] else (rows, row_scales)
        by_row = None
        if c.column_scales and not copied:  # scales arrive with their rows, and are transposed here
            by_row = self._output[1] if self._in_place else new_scales(c, x.device)
            landing = landing if rows is self._output[0] else (rows, by_row)
            row_scales = new_scales(c, x.device, by_column=True) if row_scales is by_row else row_scales
        self._stream.launch(
            self._dispatch_launch(call.blocks), x, call.scales, *landing, tag, *self._moved_by(handle.plan)
        )
        if copied:
            self._stream.launch(copy_output, (rows, row_scales), self._output)
        elif by_row is not None:
            self._stream.launch(copy_output, (row_scales,), (by_row,))
        result = DispatchedByPlan(rows, self._seen_as(call.scales, row_scales), handle, c.layout == "rank")
        return Pending("dispatch", handle, result, tiles=self.tiles)

    def start(self, pending: Pending) -> None:
        tiles, proxy = pending.tiles, self._base.world.proxy
        assert tiles is not None
        if tiles.started is not None:
            return  # the combine takes its SMs later
        if self._base.device.type == "cuda":
            # Not if launches block, because the combine waits for later launches.
            if pending.kind == "dispatch" or proxy is None or not proxy.holds_up_launches:
                tiles.leave_multiprocessors()
        elif pending.kind == "dispatch":
            self._stream.wait(pending.rest)  # the simulator runs a combine's kernels after the GEMM

    def receive(self, pending: Pending) -> None:
        if pending.sums and self._base.device.type == "cuda":  # while the last rows are in flight
            pending.sums()
        self._stream.wait(pending.rest)
        if pending.sums and self._base.device.type != "cuda":
            pending.sums()

    def _new_plans(self) -> Plans:
        return Plans(RoutingPlan, self._plan_shapes(), self._base.device, self._stream.key)

    def _plan_shapes(self) -> dict:
        c, ints = self._c, torch.int32
        R, M = c.ranks, c.max_tokens
        return {
            "node_plan": ((self.node_plan_words,), ints),
            "send_token": ((R, M), ints),
            "send_row": ((R, M), ints),
            "token_slot": ((M, R), ints),
            "records": ((R, M, record_words(c.top_k)), ints),
            "totals": ((PlanOffsets(R, c.local_experts).words,), ints),
            "row_index": ((c.capacity,), ints),
            "row_weight": ((c.capacity,), torch.float32),
        }

    def _plan_routing(self, call: DispatchCall) -> RoutingPlan:
        """Agree with all ranks on the routing of a dispatch; a fault makes all reject it. With `cleared`, a new plan of
        exactly these tokens, zero where no row exists."""
        choices, fault, tokens = call.choices, call.fault, call.x.shape[0]
        if choices.cleared:
            shapes = self._plan_shapes() | {"token_slot": ((max(tokens, 1), self._c.ranks), torch.int32)}
            device = self._base.device
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes.values()]
            plan = RoutingPlan(tokens, *tensors)
        else:
            plan = self._plans.next(tokens)
        routing = self._routing_of(dtype_name(choices.topk_idx.dtype), call.blocks)
        code_and_value = (NO_FAULT, 0) if fault is None else (fault.code, fault.value)
        _, *fields = plan.arguments
        self._stream.launch(routing, choices.topk_idx, choices.topk_weights, tokens, *code_and_value, *fields)
        return plan

    def _moved_by(self, plan: RoutingPlan) -> tuple:
        """The dispatch kernel's arguments from a plan."""
        _, send_token, send_row, _, records, totals, _, _ = plan.arguments
        return send_token, send_row, records, totals

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(self, call: CombineCall) -> Pending:
        pending = Pending("combine", call.handle, call.out, tiles=call.tiles)
        if call.phase is Phase.WHOLE:
            self._combine(call)
            return pending
        weights = [call.weights] if isinstance(call.weights, torch.Tensor) else []
        with self._stream.on_side([call.y, *call.bias, *weights]) as pending.rest:  # the caller may drop these
            pending.sums = self._combine(call)
        return pending

    def usual_combine(self, y: torch.Tensor, handle: Handle, out: torch.Tensor, weights: torch.Tensor | None) -> None:
        launch = self._usual.get("combine")
        if launch is None:
            weighted = "choices" if self._c.layout == "expert" else ""
            launch = self._usual["combine"] = self._combine_of(self._base.blocks, weighted)
        plan = handle.plan
        unused = plan.arguments[-1]
        self._stream.launch(
            launch, y, unused, unused, None, None, out, None, NO_FAULT, plan.tokens, *self._summed_by(plan)
        )

    def _combine(self, call: CombineCall) -> Callable[[], None] | None:
        """Launch the combine; with tiles, returns the launch of the sums."""
        y, plan, weights, bias, tiles = call.y, call.handle.plan, call.weights, call.bias, call.tiles
        by_row = isinstance(weights, torch.Tensor)
        weighted = "rows" if by_row else "choices" if weights and self._c.layout == "expert" else ""
        unused = plan.arguments[-1]  # placeholder for unused tensors
        row_weight, biases = weights if by_row else unused, (*bias, *(None,) * (2 - len(bias)))
        valued, row_values = "", unused
        if call.values is not None:
            row_values = call.values
            valued = "rows" if row_values.dim() == 1 else "choices"
            row_values = (row_values if row_values.numel() else self._no_values).view(-1)
        key = call.blocks, weighted, valued, len(bias), tiles.count if tiles else 0
        launch = self._combine_of(*key)
        if tiles and tiles.started is not None:
            # A kernel's first launch loads it, for which the driver waits until running kernels have ended. A combine that
            # waits for a later GEMM would never end, so the first call takes its SMs at once.
            if key in self._loaded:
                self._stream.launch(tiles.await_start)
            self._loaded.add(key)
        self._stream.launch(
            launch, y, row_weight, row_values, *biases, call.out, call.out_values, call.code, plan.tokens,
            *self._summed_by(plan), *((tiles.words, tiles.calls, tiles.growth) if tiles else ()),
        )  # fmt: skip
        if not tiles:
            return None
        arguments = y, row_weight, *biases, call.out, plan.tokens, *self._summed_by(plan)
        return partial(self._stream.launch, self._sums_of(weighted, len(bias)), *arguments)

    def _summed_by(self, plan: RoutingPlan) -> tuple:
        """The summing kernel's arguments from a plan."""
        return plan.arguments[3:6]  # token_slot, records, totals


# The arguments of a call to a launch, in this order.
_NODES = ("tokens", "token_slot", "send_row", "totals", "node_plan")


def _rows(config: Config, at: NodeLayout) -> dict[str, tuple[int, int, torch.dtype]]:
    """Buffers of rows: "kernel.parameter" -> (rows, columns, dtype). Dispatch and combine share their memory."""
    c, M = config, config.max_tokens
    payload = FP8_DTYPE if c.quantize_combine else c.combine_dtype
    arrival = shared_rows(c, proxied=False)["dispatch.arrival"][1]
    back, received = most_sent(at.origins, M, c.top_k), rows_received(c)
    # Unquantised rows lie behind the slots, see `_rows_of`.
    behind, apart = (0, received) if c.quantize_combine else (received, 1)
    return {
        "dispatch.arrival": (arrival, c.row_words, torch.int32),
        "dispatch.staged": ((at.nodes - 1) * M, c.row_words, torch.int32),
        "dispatch.to_forward": (at.slots * M, c.row_words, torch.int32),
        "combine.staged": (at.slots * M, c.hidden, payload),
        "combine.slots": (back + behind, c.hidden, payload),
        "combine.offered": (apart, c.hidden, c.combine_dtype),
    }


def _words(rows: dict[str, tuple[int, int, torch.dtype]], kernel: str) -> int:
    """4-byte words of a kernel's rows; each buffer begins at a multiple of 256 bytes."""
    specs = (spec for name, spec in rows.items() if name.startswith(f"{kernel}."))
    return sum(-(-n * columns * dtype.itemsize // 256) * 64 for n, columns, dtype in specs)


class NodeThroughputMode(OverNodes, ThroughputMode):
    """Throughput mode for rows that cross the network once per node."""

    _shares_rows, _puts_staged, _lands_whole = True, False, False
    dispatch_takes = (*DISPATCH, "node_plan")
    combine_takes = (*(name for name in COMBINE if name != "token_slot"), "node_plan")

    @staticmethod
    def carried(config: Config, tuning: Tuning, at: NodeLayout) -> BufferSpecs:
        c, M, S = config, config.max_tokens, at.slots
        scales, G, chunks, rows = max(c.scale_words, 1), groups_of(c.hidden), -(-M // tuning.chunk), _rows(c, at)
        ints, floats, words = torch.int32, torch.float32, torch.uint64
        return {
            "rows.shared": ((max(_words(rows, kernel) for kernel in ("dispatch", "combine")),), ints),
            "nodes.heads_in": ((S, at.head_words), ints),
            "nodes.pairs_in": ((S, M, 2 * at.size), ints),
            "nodes.heads_arrived": ((S,), words),
            "dispatch.to_forward_scales": ((S * M if c.scale_words else 1, scales), ints),
            "dispatch.forward_arrived": ((S, chunks), words),
            "combine.staged_scales": ((S * M if c.quantize_combine else 1, G), floats),
            "combine.staged_values": ((S * M, c.top_k), floats),
            "combine.slot_values": ((rows["combine.slots"][0], c.top_k), floats),
            "combine.offered_values": ((rows["combine.offered"][0], c.top_k), floats),
            "combine.offer_ready": ((at.lists, chunks), words),
        }

    @staticmethod
    def node_buffers(
        config: Config, tuning: Tuning, nodes: NodeSizes, masks: Sequence[tuple[bool, ...]] = ()
    ) -> BufferSpecs:
        c, M, at = config, config.max_tokens, with_room(config.ranks, nodes, masks)
        staged, chunks = (at.nodes - 1) * M, -(-M // tuning.chunk)
        ints, floats, words = torch.int32, torch.float32, torch.uint64
        base = symmetric_buffers(config, tuning, proxied=False)
        return (
            {name: spec for name, spec in base.items() if not name.startswith("rows.")}
            | {
                "nodes.heads_out": ((at.nodes, at.head_words), ints),
                "nodes.pairs_out": ((at.nodes, M, 2 * at.size), ints),
                "dispatch.staged_scales": ((staged if c.scale_words else 1, max(c.scale_words, 1)), ints),
                "combine.slot_scales": (
                    (most_sent(at.origins, M, c.top_k) if c.quantize_combine else 1, groups_of(c.hidden)),
                    floats,
                ),
                "combine.arrived": ((at.origins, chunks), words),
            }
            | NodeThroughputMode.carried(c, tuning, at)
        )

    def __init__(self, base: AllToAll, config: Config, masks: Sequence[tuple[bool, ...]]):
        super().__init__(base, config, masks)
        self._constants["nodes"] = self._buffers("nodes") | {"calls": base.counters(base.blocks)}
        self._use_map(base.active_mask)

    def _rows_of(self, kernel: str) -> dict[str, torch.Tensor]:
        c, views, begin = self._c, {}, 0
        for name, (count, columns, dtype) in _rows(c, self._at).items():
            if name.startswith(f"{kernel}."):
                words = count * columns * dtype.itemsize // 4
                memory = self._symmetric["rows.shared"][begin : begin + words]
                views[name.removeprefix(f"{kernel}.")] = memory.view(dtype).view(count, columns)
                begin += -(-words // 64) * 64
        if kernel == "combine" and not c.quantize_combine:
            # Rows for tokens of other nodes lie behind the slots if dtypes are equal.
            behind, values = most_sent(self._at.origins, c.max_tokens, c.top_k), self._symmetric["combine.slot_values"]
            views |= {"offered": views["slots"][behind:], "offered_values": values[behind:]}
        return views

    @property
    def node_plan_words(self) -> int:
        return NodePlanOffsets(self._at, self._c.max_tokens).words

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], object]]:
        return [*super().variants(everything), functools.partial(self._nodes_launch, self._base.blocks)]

    def _route(self, kernel: str) -> dict[str, Any]:
        if kernel == "routing":
            return {"node_size": self._at.size if self._at.of.is_even else self._at.of.sizes}
        return {"nodes": self._at.node_sizes, "slots" if kernel == "dispatch" else "forwarder_slots": self._at.slots}

    def _nodes_launch(self, blocks: int) -> Callable[..., None]:
        return self._launch(self._new_nodes, blocks)

    def _new_nodes(self, blocks: int) -> Launch:
        c, base, at = self._c, self._base, self._at
        kernel = plan_nodes(
            c.ranks, c.num_experts, at.node_sizes, at.slots, c.max_tokens, blocks, base.threads, **self._fewer(blocks)
        )
        return Launch(kernel, self._constants["nodes"], _NODES, base.world)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _plan_routing(self, call: DispatchCall) -> RoutingPlan:
        plan = super()._plan_routing(call)
        node_plan, _, send_row, token_slot, _, totals, _, _ = plan.arguments
        self._stream.launch(self._nodes_launch(call.blocks), plan.tokens, token_slot, send_row, totals, node_plan)
        return plan

    def _moved_by(self, plan: RoutingPlan) -> tuple:
        return *super()._moved_by(plan), plan.arguments[0]

    def _summed_by(self, plan: RoutingPlan) -> tuple:
        node_plan, _, _, _, records, totals, _, _ = plan.arguments
        return records, totals, node_plan
