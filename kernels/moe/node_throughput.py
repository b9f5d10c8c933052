"""Throughput mode on the host where rows cross the network once per node: other buffers and kernels, the same calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tilescale_net.kernels.collective import BufferSpecs
from tilescale_net.kernels.moe import throughput
from tilescale_net.kernels.moe.config import FP8, Config, name_of
from tilescale_net.kernels.moe.handle import RoutingPlan
from tilescale_net.kernels.moe.mode import Launch
from tilescale_net.kernels.moe.node_combine import combine_nodes
from tilescale_net.kernels.moe.node_dispatch import dispatch_nodes
from tilescale_net.kernels.moe.node_layout import Gateways, NodePlan, Nodes
from tilescale_net.kernels.moe.node_refusal import refuse_nodes
from tilescale_net.kernels.moe.node_routing import plan_nodes
from tilescale_net.kernels.moe.row_ops import groups_of


def _carrying(config: Config, tuning, at: Nodes) -> BufferSpecs:
    """Symmetric memory of what a gateway carries for others, which grows with the sources that it serves."""
    c, M, S = config, config.max_tokens, at.slots
    row, scales, G = c.row_words, max(c.scale_words, 1), groups_of(c.hidden)
    payload, chunks = FP8 if c.quantize_combine else c.combine_dtype, -(-M // tuning.chunk)
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    # Rows that nobody quantises lie behind the slots, see `_place_relayed`.
    behind, apart = (0, at.lists * M) if c.quantize_combine else (at.lists * M, 1)
    return {
        "nodes.heads_in": ((S, at.head_words), ints),
        "nodes.pairs_in": ((S, M, 2 * at.size), ints),
        "nodes.told": ((S,), words),
        "dispatch.relayed": ((S * M, row), ints),
        "dispatch.relayed_scales": ((S * M if c.scale_words else 1, scales), ints),
        "dispatch.came": ((S, chunks), words),
        "combine.staged": ((S * M, c.hidden), payload),
        "combine.staged_scales": ((S * M if c.quantize_combine else 1, G), floats),
        "combine.staged_values": ((S * M, c.top_k), floats),
        "combine.slots": ((at.origins * M + behind, c.hidden), payload),
        "combine.slot_values": ((at.origins * M + behind, c.top_k), floats),
        "combine.relayed": ((apart, c.hidden), c.combine_dtype),
        "combine.relayed_values": ((apart, c.top_k), floats),
        "combine.summed": ((at.lists, chunks), words),
    }


def symmetric_buffers(config: Config, tuning, nodes: int) -> BufferSpecs:
    """Symmetric memory of the mode when all ranks take part: "kernel.parameter" -> (shape, dtype)."""
    c, M, at = config, config.max_tokens, Nodes(config.ranks, nodes, nodes - 1)
    staged, chunks = (nodes - 1) * M, -(-M // tuning.chunk)
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    specs = throughput.symmetric_buffers(config, tuning, proxied=False)
    return (
        specs
        | {
            "nodes.heads_out": ((nodes, at.head_words), ints),
            "nodes.pairs_out": ((nodes, M, 2 * at.size), ints),
            "dispatch.staged": ((staged, c.row_words), ints),
            "dispatch.staged_scales": ((staged if c.scale_words else 1, max(c.scale_words, 1)), ints),
            "combine.slot_scales": ((at.origins * M if c.quantize_combine else 1, groups_of(c.hidden)), floats),
            "combine.arrived": ((at.origins, chunks), words),
        }
        | _carrying(c, tuning, at)
    )


class NodeThroughputMode(throughput.ThroughputMode):
    """As its base, with gateways between nodes; see node_layout.py."""

    def __init__(self, base, config: Config):
        self._at = self._room(Nodes(config.ranks, base.nodes, base.nodes - 1), base.mask)
        specs = symmetric_buffers(config, base.tuning, base.nodes) | _carrying(config, base.tuning, self._at)
        super().__init__(base, config, specs)
        own = {"calls": base.counters(base.blocks)}
        self._fixed["nodes"] = self._buffers("nodes") | own
        self._place_relayed()
        self._use_map(base.mask)

    @property
    def sums_over(self) -> int:
        return self._at.nodes

    @property
    def node_plan_words(self) -> int:
        return NodePlan(self._at, self._c.max_tokens).words

    @staticmethod
    def _room(at: Nodes, mask: tuple[bool, ...]) -> Nodes:
        """With slots for as many sources as a gateway serves among these members."""
        return replace(at, slots=max(at.slots, Gateways(mask, at.nodes).slots))

    def _place_relayed(self) -> None:
        """Rows for tokens of other nodes lie behind the slots where they have their dtype."""
        fixed, begin = self._fixed["combine"], self._at.origins * self._c.max_tokens
        if not self._c.quantize_combine:
            fixed["relayed"], fixed["relayed_values"] = fixed["slots"][begin:], fixed["slot_values"][begin:]

    def _use_map(self, mask: tuple[bool, ...]) -> None:
        """Let the kernels go by the map of these members."""
        words = Gateways(mask, self._at.nodes).words(self._base.rank, self._at.slots)
        node_map = torch.tensor(words, dtype=torch.int32, device=self._base.device)
        for fixed in ("nodes", "dispatch", "combine"):
            self._fixed[fixed]["node_map"] = node_map

    def regroup(self, mask: tuple[bool, ...]) -> None:
        """A gateway that is left out is replaced, by one that may then serve more sources than there was room for."""
        at = self._room(self._at, mask)
        if at != self._at:
            self._at = at
            with torch.inference_mode(False):
                grown = self._base.replace(self._symmetric, _carrying(self._c, self._tuning, at))
            self._symmetric.update(grown)
            for kernel, fixed in self._fixed.items():
                fixed.update(self._buffers(kernel))
            self._place_relayed()
        self._use_map(mask)
        self._launches.clear()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def variants(self, everything: bool) -> list[Callable[[], Launch]]:
        return [*super().variants(everything), self._nodes_launch]

    def _nodes_launch(self) -> Launch:
        c, base, at = self._c, self._base, self._at

        def make() -> Launch:
            kernel = plan_nodes(c.ranks, c.num_experts, at.nodes, at.slots, c.max_tokens, base.blocks, base.threads)
            return Launch(kernel, self._fixed["nodes"])

        return self._launch("nodes", make)

    def _dispatch_launch(self) -> Launch:
        c, base, t, senders, at = self._c, self._base, self._tuning, self._senders, self._at

        def make() -> Launch:
            kernel = dispatch_nodes(
                c.ranks, c.num_experts, at.nodes, at.slots, c.top_k, c.max_tokens, c.row_words, c.scale_words,
                self.placement, t.chunk, self._proxied_chunk(c.row_bytes), senders, base.blocks - senders, base.threads,
            )  # fmt: skip
            return Launch(kernel, self._fixed["dispatch"])

        return self._launch("dispatch", make)

    def _combine_of(self, weighted: str, valued: str = "", biases: int = 0) -> Launch:
        c, base, t, at = self._c, self._base, self._tuning, self._at
        payload = FP8 if c.quantize_combine else c.combine_dtype

        def make() -> Launch:
            kernel = combine_nodes(
                c.ranks, c.num_experts, at.nodes, at.slots, c.top_k, c.max_tokens, c.hidden, name_of(c.combine_dtype),
                c.layout == "rank", weighted, c.quantize_combine, valued, biases, t.chunk,
                self._proxied_chunk(c.hidden * payload.itemsize), t.combine_senders, base.blocks - t.combine_senders,
                t.combine_threads,
            )  # fmt: skip
            return Launch(kernel, self._fixed["combine"] | {"tag": 0})

        return self._launch(("combine", weighted, valued, biases), make)

    def _refusal(self, kernel: str) -> Launch:
        c, base, at = self._c, self._base, self._at
        dispatch = kernel == "dispatch"
        senders = self._senders if dispatch else self._tuning.combine_senders

        def make() -> Launch:
            refuse = refuse_nodes(
                c.ranks, at.nodes, at.slots, dispatch, self._chunks, senders, base.blocks, base.threads
            )
            fixed = self._fixed[kernel]
            return Launch(refuse, fixed | {"onward": fixed["came" if dispatch else "summed"]})

        return self._launch(("refusal", kernel), make)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _plan_routing(self, topk_idx, topk_weights, tokens: int, *fault, **options) -> RoutingPlan:
        plan = super()._plan_routing(topk_idx, topk_weights, tokens, *fault, **options)
        self._stream.launch(
            self._nodes_launch(), tokens=tokens, token_slot=plan.token_slot, send_row=plan.send_row, totals=plan.totals,
            node_plan=plan.node_plan,
        )  # fmt: skip
        return plan

    def _move_by(self, plan: RoutingPlan) -> dict:
        return {"node_plan": plan.node_plan}

    def _sum_by(self, plan: RoutingPlan) -> dict:
        return {"node_plan": plan.node_plan}
