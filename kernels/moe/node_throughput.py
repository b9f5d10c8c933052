"""Throughput mode on the host where rows cross the network once per node: other buffers and kernels, the same calls."""

import functools
from collections.abc import Callable, Sequence

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.moe import throughput, throughput_buffers
from tilescale_net.kernels.moe.combine import combine_throughput
from tilescale_net.kernels.moe.config import FP8, Config
from tilescale_net.kernels.moe.dispatch import dispatch_throughput
from tilescale_net.kernels.moe.handle import RoutingPlan
from tilescale_net.kernels.moe.launch import Launch
from tilescale_net.kernels.moe.layout import Gateways, NodeLayout, NodePlanOffsets, most_sent, with_room
from tilescale_net.kernels.moe.routing import plan_nodes
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.kernels.moe.throughput_buffers import rows_received, shared_rows

# What a call gives to a launch, in this order.
_NODES = ("tokens", "token_slot", "send_row", "totals", "node_plan")
_DISPATCH = (*throughput.DISPATCH, "node_plan")
_COMBINE = (*(name for name in throughput.COMBINE if name != "token_slot"), "node_plan")


def _rows(config: Config, at: NodeLayout) -> dict[str, tuple[int, int, torch.dtype]]:
    """Buffers of rows: "kernel.parameter" -> (rows, columns, dtype). Dispatch and combine share the memory of theirs."""
    c, M = config, config.max_tokens
    payload = FP8 if c.quantize_combine else c.combine_dtype
    arrival = shared_rows(c, proxied=False)["dispatch.arrival"][1]
    back, kept = most_sent(at.origins, M, c.top_k), rows_received(c)
    # Rows that are not quantised lie behind the slots, see `_rows_of`.
    behind, apart = (0, kept) if c.quantize_combine else (kept, 1)
    return {
        "dispatch.arrival": (arrival, c.row_words, torch.int32),
        "dispatch.staged": ((at.nodes - 1) * M, c.row_words, torch.int32),
        "dispatch.relayed": (at.slots * M, c.row_words, torch.int32),
        "combine.staged": (at.slots * M, c.hidden, payload),
        "combine.slots": (back + behind, c.hidden, payload),
        "combine.relayed": (apart, c.hidden, c.combine_dtype),
    }


def _words(rows: dict[str, tuple[int, int, torch.dtype]], kernel: str) -> int:
    """4-byte words of a kernel's rows; each buffer begins at a multiple of 256 bytes."""
    found = (count for name, count in rows.items() if name.startswith(f"{kernel}."))
    return sum(-(-n * columns * dtype.itemsize // 256) * 64 for n, columns, dtype in found)


def _carrying(config: Config, tuning, at: NodeLayout) -> BufferSpecs:
    """Symmetric memory of what a gateway carries for others, which grows with the sources that it serves."""
    c, M, S = config, config.max_tokens, at.slots
    scales, G, chunks, rows = max(c.scale_words, 1), groups_of(c.hidden), -(-M // tuning.chunk), _rows(c, at)
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    return {
        "rows.shared": ((max(_words(rows, kernel) for kernel in ("dispatch", "combine")),), ints),
        "nodes.heads_in": ((S, at.head_words), ints),
        "nodes.pairs_in": ((S, M, 2 * at.size), ints),
        "nodes.told": ((S,), words),
        "dispatch.relayed_scales": ((S * M if c.scale_words else 1, scales), ints),
        "dispatch.came": ((S, chunks), words),
        "combine.staged_scales": ((S * M if c.quantize_combine else 1, G), floats),
        "combine.staged_values": ((S * M, c.top_k), floats),
        "combine.slot_values": ((rows["combine.slots"][0], c.top_k), floats),
        "combine.relayed_values": ((rows["combine.relayed"][0], c.top_k), floats),
        "combine.summed": ((at.lists, chunks), words),
    }


def symmetric_buffers(config: Config, tuning, nodes: int, masks: Sequence[tuple[bool, ...]] = ()) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype).

    Args:
        masks: ranks that take part when they are not all, now and later.
    """
    c, M, at = config, config.max_tokens, with_room(config.ranks, nodes, masks)
    staged, chunks = (nodes - 1) * M, -(-M // tuning.chunk)
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    base = throughput_buffers.symmetric_buffers(config, tuning, proxied=False)
    return (
        {name: spec for name, spec in base.items() if not name.startswith("rows.")}
        | {
            "nodes.heads_out": ((nodes, at.head_words), ints),
            "nodes.pairs_out": ((nodes, M, 2 * at.size), ints),
            "dispatch.staged_scales": ((staged if c.scale_words else 1, max(c.scale_words, 1)), ints),
            "combine.slot_scales": (
                (most_sent(at.origins, M, c.top_k) if c.quantize_combine else 1, groups_of(c.hidden)),
                floats,
            ),
            "combine.arrived": ((at.origins, chunks), words),
        }
        | _carrying(c, tuning, at)
    )


class NodeThroughputMode(throughput.ThroughputMode):
    """As its base, with gateways between nodes; see layout.py."""

    _shares_rows = True

    def __init__(self, base, config: Config, masks: Sequence[tuple[bool, ...]]):
        self._at = with_room(config.ranks, base.nodes, masks)
        super().__init__(base, config, symmetric_buffers(config, base.tuning, base.nodes, masks))
        self._fixed["nodes"] = self._buffers("nodes") | {"calls": base.counters(base.blocks)}
        self._use_map(base.mask)

    def _rows_of(self, kernel: str) -> dict[str, torch.Tensor]:
        c, found, begin = self._c, {}, 0
        for name, (count, columns, dtype) in _rows(c, self._at).items():
            if name.startswith(f"{kernel}."):
                words = count * columns * dtype.itemsize // 4
                memory = self._symmetric["rows.shared"][begin : begin + words]
                found[name.removeprefix(f"{kernel}.")] = memory.view(dtype).view(count, columns)
                begin += -(-words // 64) * 64
        if kernel == "combine" and not c.quantize_combine:
            # Rows for tokens of other nodes lie behind the slots where they have their dtype.
            behind, values = most_sent(self._at.origins, c.max_tokens, c.top_k), self._symmetric["combine.slot_values"]
            found |= {"relayed": found["slots"][behind:], "relayed_values": values[behind:]}
        return found

    @property
    def sums_over(self) -> int:
        return self._at.nodes

    @property
    def node_plan_words(self) -> int:
        return NodePlanOffsets(self._at, self._c.max_tokens).words

    def _use_map(self, mask: tuple[bool, ...]) -> None:
        """Let the kernels go by the map of these members."""
        words = Gateways(mask, self._at.nodes).words(self._base.rank, self._at.slots)
        node_map = torch.tensor(words, dtype=torch.int32, device=self._base.device)
        for fixed in ("nodes", "dispatch", "combine"):
            self._fixed[fixed]["node_map"] = node_map

    def regroup(self, mask: tuple[bool, ...]) -> None:
        """A gateway that is left out is replaced, by one that may then serve more sources than there was room for."""
        at = with_room(self._c.ranks, self._at.nodes, [mask])
        if at.slots > self._at.slots:
            self._at = at
            with torch.inference_mode(False):
                grown = self._base.replace(self._symmetric, _carrying(self._c, self._tuning, at))
            self._symmetric.update(grown)
            for kernel, fixed in self._fixed.items():
                fixed.update(self._buffers(kernel) | self._rows_of(kernel))
            self._plans = self._new_plans()
        self._use_map(mask)
        self._launches.clear()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], object]]:
        return [*super().variants(everything), functools.partial(self._nodes_launch, self._base.blocks)]

    def _in_nodes(self) -> dict[str, int]:
        return {"node_size": self._at.size}

    def _nodes_launch(self, blocks: int) -> Callable[..., None]:
        return self._launch(self._new_nodes, blocks)

    def _new_nodes(self, blocks: int) -> Launch:
        c, base, at = self._c, self._base, self._at
        kernel = plan_nodes(
            c.ranks, c.num_experts, at.nodes, at.slots, c.max_tokens, blocks, base.threads, **self._fewer(blocks)
        )
        return Launch(kernel, self._fixed["nodes"], _NODES, base.world)

    def _new_dispatch(self, blocks: int) -> Launch:
        c, base, t, at, senders = self._c, self._base, self._tuning, self._at, self._senders_of("dispatch", blocks)
        kernel = dispatch_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.row_words, c.scale_words, self.placement, False, t.chunk,
            self._proxied_chunk(c.row_bytes), senders, blocks - senders, base.threads, nodes=at.nodes, slots=at.slots,
            **self._fewer(blocks, "dispatch"),
        )  # fmt: skip
        return Launch(kernel, self._fixed["dispatch"], _DISPATCH, base.world, **self._forms("dispatch"))

    def _new_combine(self, blocks: int, weighted: str, valued: str, biases: int) -> Launch:
        c, base, t, at, senders = self._c, self._base, self._tuning, self._at, self._senders_of("combine", blocks)
        payload = FP8 if c.quantize_combine else c.combine_dtype
        kernel = combine_throughput(
            c.ranks, c.num_experts, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), c.layout == "rank",
            weighted, c.quantize_combine, valued, biases, True, t.chunk, self._proxied_chunk(c.hidden * payload.itemsize),
            senders, blocks - senders, t.combine_threads, nodes=at.nodes, forwarder_slots=at.slots,
            **self._fewer(blocks, "combine"),
        )  # fmt: skip
        return Launch(kernel, self._fixed["combine"], _COMBINE, base.world, **self._forms("combine"))

    # -- calls ------------------------------------------------------------------------------------------------------

    def _plan_routing(self, topk_idx, topk_weights, tokens: int, blocks: int, *fault, **options) -> RoutingPlan:
        plan = super()._plan_routing(topk_idx, topk_weights, tokens, blocks, *fault, **options)
        node_plan, _, send_row, token_slot, _, totals, _, _ = plan.arguments
        self._stream.launch(self._nodes_launch(blocks), tokens, token_slot, send_row, totals, node_plan)
        return plan

    def _moved_by(self, plan: RoutingPlan) -> tuple:
        return *super()._moved_by(plan), plan.arguments[0]

    def _summed_by(self, plan: RoutingPlan) -> tuple:
        node_plan, _, _, _, records, totals, _, _ = plan.arguments
        return records, totals, node_plan
