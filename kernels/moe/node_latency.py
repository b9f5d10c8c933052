"""Latency mode on the host where rows cross the network once per node: other buffers and kernels, the same calls."""

from collections.abc import Sequence

import torch

from tilescale_net.kernels.collective import BufferSpecs, dtype_name
from tilescale_net.kernels.moe import latency
from tilescale_net.kernels.moe.config import FP8, Config
from tilescale_net.kernels.moe.handle import ReceivedRows
from tilescale_net.kernels.moe.latency_combine import combine_latency
from tilescale_net.kernels.moe.launch import Launch
from tilescale_net.kernels.moe.layout import (
    Gateways,
    HeaderLayout,
    LatencyNodePlanOffsets,
    MessageLayout,
    NodeLayout,
    with_room,
)
from tilescale_net.kernels.moe.mode import Phase
from tilescale_net.kernels.moe.row_ops import groups_of

_COMBINE = (*latency.COMBINE[:-2], "origin_slot", "tokens", "node_plan")


def _carrying(config: Config, tuning, at: NodeLayout) -> BufferSpecs:
    """Symmetric memory of what a gateway carries for others, which grows with the sources that it serves."""
    c, rows = config, 2 * at.slots * config.max_tokens
    message = MessageLayout(c.row_words, c.scale_words, c.top_k, True)
    payload, cuts = FP8 if c.quantize_combine else c.combine_dtype, latency.parts(c, tuning, True)[1]
    return {
        "dispatch.relayed": ((rows, message.words), torch.int32),
        "dispatch.came": ((rows,), torch.uint64),
        "combine.staged": ((rows, c.hidden), payload),
        "combine.staged_scales": ((rows if c.quantize_combine else 1, groups_of(c.hidden)), torch.float32),
        "combine.gathered": ((rows * at.size, c.hidden), c.combine_dtype),
        "combine.summed": ((rows * at.size, cuts), torch.uint64),
    }


def symmetric_buffers(config: Config, tuning, nodes: int, masks: Sequence[tuple[bool, ...]] = ()) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype).

    Args:
        masks: ranks that take part when they are not all, now and later.
    """
    c, R, M, at = config, config.ranks, config.max_tokens, with_room(config.ranks, nodes, masks)
    message, header = MessageLayout(c.row_words, c.scale_words, c.top_k, True), HeaderLayout(c.local_experts, True)
    payload, cuts, back = (
        FP8 if c.quantize_combine else c.combine_dtype,
        latency.parts(c, tuning, True)[1],
        2 * at.origins * M,
    )
    return (
        latency.symmetric_buffers(c, tuning, proxied=True)
        | {
            "dispatch.message": ((2 * M, message.words), torch.int32),
            "dispatch.header_out": ((2 * R, header.words), torch.int32),
            "dispatch.header_in": ((2 * R, header.words), torch.int32),
            "dispatch.arrival": ((2 * R * M, message.words), torch.int32),
            "combine.slots": ((back, c.hidden), payload),
            "combine.slot_scales": ((back if c.quantize_combine else 1, groups_of(c.hidden)), torch.float32),
            "combine.arrived": ((back, cuts), torch.uint64),
        }
        | _carrying(c, tuning, at)
    )


class NodeLatencyMode(latency.LatencyMode):
    """As its base, with gateways between nodes; see layout.py."""

    dispatch_takes = (*latency.DISPATCH[:-3], "origin_slot", "node_plan", *latency.DISPATCH[-3:])

    def __init__(self, base, config: Config, masks: Sequence[tuple[bool, ...]]):
        self._at = with_room(config.ranks, base.nodes, masks)
        super().__init__(base, config, symmetric_buffers(config, base.tuning, base.nodes, masks))
        self._use_map(base.mask)

    @property
    def sums_over(self) -> int:
        return self._at.nodes

    def _use_map(self, mask: tuple[bool, ...]) -> None:
        """Let the kernels go by the map of these members."""
        words = Gateways(mask, self._at.nodes).words(self._base.rank, self._at.slots)
        node_map = torch.tensor(words, dtype=torch.int32, device=self._base.device)
        for fixed in (self._dispatch_fixed, self._combine_fixed):
            fixed["node_map"] = node_map

    def regroup(self, mask: tuple[bool, ...]) -> None:
        """A gateway that is left out is replaced, by one that may then serve more sources than there was room for."""
        at = with_room(self._c.ranks, self._at.nodes, [mask])
        if at.slots > self._at.slots:
            self._at = at
            with torch.inference_mode(False):
                grown = self._base.replace(self._symmetric, _carrying(self._c, self._base.tuning, at))
            self._symmetric.update(grown)
            self._dispatch_fixed.update(self._buffers("dispatch"))
            self._combine_fixed.update(self._buffers("combine"))
            self._plans = self._new_plans()
        self._use_map(mask)
        self._launches.clear()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def _on_the_way(self) -> dict[str, int]:
        return {"nodes": self._at.nodes, "slots": self._at.slots}

    def _new_combine(self, blocks: int, phase: Phase, weighted: bool, biases: int, timed: bool = False) -> Launch:
        c, base, at = self._c, self._base, self._at
        kernel = combine_latency(
            c.ranks, c.top_k, c.max_tokens, c.hidden, dtype_name(c.combine_dtype), weighted, c.quantize_combine, True,
            phase.sends, phase.receives, self._parts, biases, blocks, base.threads, timed=timed, nodes=at.nodes,
            forwarder_slots=at.slots, **self._fewer(blocks),
        )  # fmt: skip
        return Launch(
            kernel, self._combine_fixed, _COMBINE + latency.TIMED * timed, base.world, **self._combine_forms()
        )

    # -- calls ------------------------------------------------------------------------------------------------------

    def _plan_shapes(self) -> dict:
        c, at = self._c, self._at
        words = LatencyNodePlanOffsets(at, c.max_tokens, c.top_k).words
        return super()._plan_shapes() | {
            "origin_slot": ((c.max_tokens, at.origins), torch.int32),
            "node_plan": ((words,), torch.int32),
        }

    def _received_by(self, plan: ReceivedRows) -> tuple:
        return plan.arguments

    def _summed_by(self, plan: ReceivedRows) -> tuple:
        origin_slot, node_plan = plan.arguments[6:]
        return origin_slot, plan.tokens, node_plan
