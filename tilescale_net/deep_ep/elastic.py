"""The interface of DeepEP's second version for dispatch and combine: ElasticBuffer and its EPHandle."""

from dataclasses import dataclass
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.deep_ep.high_throughput import Bias, biases_of, check_rows, fresh, joined, parts
from tilescale_net.deep_ep.objects import EXPERTS, GroupBuffer, check_dimensions, room_for, widest
from tilescale_net.deep_ep.utils import EventHandle, EventOverlap, begin, end
from tilescale_net.errors import TileScaleError
from tilescale_net.kernels.moe import AllToAll, Dispatched, Handle, metadata
from tilescale_net.kernels.moe.handle import Rows
from tilescale_net.kernels.moe.layout import PlanOffsets
from tilescale_net.runtime import groups
from tilescale_net.runtime.launch_args import without_default_device
from tilescale_net.runtime.world import World

NUM_SMS = 24  # default blocks of a kernel


@dataclass
class EPHandle:
    """The handle of a dispatch, for its combines and for dispatches with the same choices.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [tokens, top_k] choices of this rank's tokens.
        num_recv_tokens, num_expanded_tokens: rows received, one for each token, and one for each choice with the gaps of
            the alignment; the maximum if the host has not waited for them.
        num_recv_tokens_per_expert_list: rows per local expert, multiples of the alignment; empty if it has not.
        psum_num_recv_tokens_per_scaleup_rank: [ranks of a node] int32, rows from all ranks up to each; on several nodes, from
            the ranks of that place in all of them. Rows themselves are ordered by source rank.
        psum_num_recv_tokens_per_expert: [local experts] int32: end of each expert's rows, with the gap after them; without
            it with do_expand.
        num_unaligned_recv_tokens_per_expert: [local experts] int32, rows of each.
        recv_src_metadata: [rows, 2 + top_k] int32: source rank * num_max_tokens_per_rank + token there; source rank * top_k +
            its last choice here; the expanded row of each choice. -1: none.
        recv_topk_idx: result of the dispatch.
        token_metadata_at_forward, channel_linked_list: None: offsets in DeepEP's buffers; this package keeps its own routing.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    recv_topk_idx: torch.Tensor | None
    _world: World
    _op: AllToAll
    _handle: Handle
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """[tokens, top_k] int32: offsets of this rank's rows at the ranks of their choices, -1 without a choice; the same for
        equal choices. They are not offsets in DeepEP's buffers."""
        slots = self._handle.plan.token_slot[: len(self.topk_idx)]
        rank = self.topk_idx.long() // (self.num_experts // slots.shape[1])
        return slots.gather(1, rank.clamp(min=0)).masked_fill(rank < 0, -1)


class ElasticBuffer(GroupBuffer):
    """Dispatch and combine of the ranks of a group, which construct, use and destroy it collectively.

    Args:
        group: see `Buffer`.
        num_bytes: least size of the symmetric heap, if this object makes it; default: the size for the next four.
        num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: the largest calls, for `get_buffer_size_hint`.
        num_max_tokens_per_rank: also the default of `dispatch`; calls with more construct another object.
        allow_multiple_reduction: False: a sum is rounded once. Rows that are summed before they travel, with do_expand and on
            several nodes, then travel in float32, in twice the time and memory.
        num_cpu_bytes: 0; others are not supported.
        deterministic, prefer_overlap_with_compute: no effect: results never depend on timing, and each rank sums its
            experts' rows before they travel.
        allow_hybrid_mode: no effect: rows cross the network once per node.
        num_cpu_timeout_secs, num_gpu_timeout_secs: no effect: TSN_TIMEOUT limits all waits.
        sl_idx, num_allocated_qps, explicitly_destroy: no effect.

    Args of methods:
        cumulative_local_expert_recv_stats: [local experts] int32, to which the counts are added.
        num_sms: blocks of the call's kernels; 0: `get_theoretical_num_sms`.
        num_qps: no effect.
        previous_event, previous_event_before_epilogue: the call begins after them.
        async_with_compute_stream: return an event.
        allocate_on_comm_stream: no effect.
        do_handle_copy: copy the choices into the handle; without a copy do not overwrite them while the handle is in use.
        use_comm_stream, with_cpu_sync, sequential: no effect.
        num_experts, num_scaleout_topk, rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs: no effect.

    Attributes:
        group, rank_idx, num_ranks, num_max_tokens_per_rank, allow_hybrid_mode, deterministic: the arguments.
        num_bytes: the requested least size of the heap; 0 without a request.
        num_scaleout_ranks, num_scaleup_ranks, num_rdma_ranks, num_nvlink_ranks: nodes, and ranks of one, of the group.
        scaleout_rank_idx, scaleup_rank_idx: this rank's node, and its index in the node.
        num_allocated_qps: 0, without queue pairs. runtime: None, without a C++ object.
    """

    num_allocated_qps = 0

    def __init__(
        self, group: "tsn.Group", num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True, prefer_overlap_with_compute: bool = True, sl_idx: int = 3,
        num_allocated_qps: int = 0, num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):  # fmt: skip
        if num_cpu_bytes:
            raise TileScaleError("deep_ep.ElasticBuffer: num_cpu_bytes (Engram) is not supported; leave it out")
        self._rounds_once = not allow_multiple_reduction
        if num_bytes is None and hidden and num_max_tokens_per_rank:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode,
                allow_multiple_reduction,
            )  # fmt: skip
        self.num_bytes = num_bytes or 0
        super().__init__(group, self.num_bytes)
        self.group, self.rank_idx, self.num_ranks = group, self._world.rank, self._world.size
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.allow_hybrid_mode, self.deterministic = allow_hybrid_mode, deterministic

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """Bytes of symmetric memory for both layouts, with rows of BF16, and of FP8 too if that is requested.

        Enough for ranks of one node and for nodes of 8 ranks.
        """
        ranks = _size(group)
        sizes = -(-EXPERTS // ranks) * ranks, num_max_tokens_per_rank, hidden, num_topk or 8
        dtypes = [torch.bfloat16, torch.float8_e4m3fn][: 1 + use_fp8_dispatch]
        layouts = dict(layout="rank"), dict(layout="expert", zero_copy=False)
        options: dict[str, Any] = dict(
            combine_dtype=torch.bfloat16 if allow_multiple_reduction else torch.float32, ranks=ranks
        )
        kinds = [(dtype, layout) for dtype in dtypes for layout in layouts]
        return widest(
            ranks,
            lambda nodes: sum(AllToAll.heap_bytes(*sizes, d, **options, **layout, nodes=nodes) for d, layout in kinds),
        )

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait until the kernels of all ranks have ended and all ranks have called it."""
        self._world.barrier()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Nodes of the group, and its ranks on one."""
        return self._world.topology.nodes, self._world.topology.node_size

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0, nvlink_gbs: float = 0,
        sm_read_gbs: float = 200, sm_write_gbs: float = 50,
    ) -> int:  # fmt: skip
        """Default number of a kernel's blocks; measured, not computed from bandwidths."""
        return NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0, without queue pairs."""
        return 0

    # -- dispatch ---------------------------------------------------------------------------------------------------

    @without_default_device
    def dispatch(
        self, x: Rows, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0, num_qps: int = 0,
        previous_event: EventHandle | None = None, previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, handle: EPHandle | None = None,
        do_handle_copy: bool = True, do_cpu_sync: bool | None = None, do_expand: bool = False,
        do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:  # fmt: skip
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [tokens, hidden] bfloat16, or a pair of float8_e4m3fn rows and scales; see `Buffer.dispatch`.
            topk_idx, topk_weights: [tokens, top_k], of choices, -1 for none, and their weights.
            handle: of an earlier dispatch: its choices, with other rows and optionally other weights.
            num_experts, num_max_tokens_per_rank, expert_alignment: default: the handle's; 1 for the last without a handle.
            do_cpu_sync: wait on the host for the number of rows, which the results then have exactly; the default without a
                handle. Otherwise they have room for the worst case.
            do_expand: a row for each choice, ordered by expert, instead of one for each token.
            do_zero_padding: with do_expand, zeros in the gaps of the alignment: rows, scales and weights.
            use_tma_aligned_col_major_sf: scales in columns that begin at multiples of 16 bytes.

        Returns:
            Rows (and scales), local experts of the choices ([rows, top_k] int64, -1 for experts of other ranks; None with
            do_expand), weights ([rows, top_k], with do_expand [rows]; None without weights), EPHandle, event.

        Raises:
            ValueError, TypeError, HeapError: as `kernels.moe.AllToAll.dispatch`, on all ranks.
        """
        for event in (previous_event, previous_event_before_epilogue):
            begin(EventOverlap(event) if event is not None else None, async_with_compute_stream, False)
        self._objects.order.follow()
        known, stats = handle, cumulative_local_expert_recv_stats
        with self._objects.rejecting("ElasticBuffer.dispatch"):
            check_rows(x)
            if (known is None) == (topk_idx is None):
                raise ValueError("give topk_idx, or the handle of an earlier dispatch")
            if known is not None:
                self._check_handle(known)
                topk_idx, do_expand = known.topk_idx, known.do_expand
                requested = num_experts, num_max_tokens_per_rank, expert_alignment
                fixed = known.num_experts, known.num_max_tokens_per_rank, known.expert_alignment
                if any(a is not None and a != b for a, b in zip(requested, fixed)):
                    raise ValueError(f"the handle is for experts, tokens, alignment {fixed}, not {requested}")
                num_experts, num_max_tokens_per_rank, expert_alignment = fixed
            check_dimensions("topk_idx", topk_idx, 2)
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            if not num_experts or not most:
                raise ValueError("give num_experts, and num_max_tokens_per_rank to the call or to the buffer")
            if stats is not None:
                check_dimensions("cumulative_local_expert_recv_stats", stats, 1)
                if len(stats) != num_experts // self.num_ranks:
                    raise ValueError(
                        f"cumulative_local_expert_recv_stats has {len(stats)} elements for {num_experts // self.num_ranks} experts"
                    )
        rows, scales = parts(x)
        assert topk_idx is not None and num_experts is not None
        num_sms = num_sms or (known.num_sms if known is not None else NUM_SMS)
        room = self._room(most) if known is None else known._op.config.max_tokens
        sizes = num_experts, room, rows.shape[1], topk_idx.shape[1], rows.dtype
        words = None if scales is None else scales.shape[-1]
        summed = do_expand or self.num_scaleout_ranks > 1  # before they travel
        combine_dtype = torch.float32 if self._rounds_once and summed else torch.bfloat16
        again = " with a handle" if known is not None and topk_weights is None else ""
        self._objects.calls.note("dispatch{}: {} experts, hidden {}, top_k {}, {}", again, num_experts, *sizes[2:])
        op = self._objects.elastic(sizes, num_sms, words, expert_alignment or 1, do_expand, combine_dtype)
        blocks = self._objects.blocks(op, num_sms)
        if known is not None and topk_weights is None:
            received = op.dispatch(joined(rows, scales), handle=known._handle, blocks=blocks)
        else:
            received = op.dispatch(
                joined(rows, scales), topk_idx.contiguous(), topk_weights, blocks=blocks, max_tokens=most
            )
        syncs = known is None if do_cpu_sync is None else do_cpu_sync
        if known is None:
            known = _handle_of(
                self._world, op, received, topk_idx.clone() if do_handle_copy else topk_idx, do_expand, num_sms, syncs,
                self.num_scaleup_ranks, most,
            )  # fmt: skip
        if stats is not None:
            stats.add_(received.counts)
        count = known.num_expanded_tokens if do_expand else known.num_recv_tokens
        gaps = _gaps(received, len(received.x)) if do_expand and do_zero_padding else None
        out = _result(received.x, count, gaps, do_expand)
        out_scales = None if received.scales is None else _result(received.scales, count, gaps, do_expand)
        if use_tma_aligned_col_major_sf and out_scales is not None:
            out_scales = _column_major(out_scales)
        weights = None
        if topk_weights is not None:
            row_weights: Any = received.row_weight if do_expand else metadata(received.handle).topk_weights
            weights = row_weights[:count] if gaps is None else row_weights[:count].masked_fill(gaps[:count], 0.0)
        return joined(out, out_scales), known.recv_topk_idx, weights, known, end(async_with_compute_stream)

    def _check_handle(self, handle: object) -> None:
        """Raise TypeError unless it is a handle, ValueError for one of another group."""
        if not isinstance(handle, EPHandle):
            raise TypeError(f"handle is a {type(handle).__name__}; give the result of dispatch")
        self._objects.check_world(handle._world)

    def _room(self, most: int) -> int:
        """Tokens of the object for calls with at most this many per rank, rounded up so that calls share objects."""
        return self.num_max_tokens_per_rank if most <= self.num_max_tokens_per_rank else room_for(most)

    # -- combine ----------------------------------------------------------------------------------------------------

    @without_default_device
    def combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None = None, bias: Bias = None,
        num_sms: int = 0, num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Sum the rows of each token. Collective; a handle serves any number of times.

        Args:
            x: [rows, hidden] bfloat16, in the order of dispatch's rows.
            handle: of that dispatch.
            topk_weights: float32, [rows, top_k] or with do_expand [rows], returned to the choices.
            bias: one or two tensors [tokens, hidden] bfloat16, added before the sum is rounded.
            num_sms: at most the dispatch's; 0: the dispatch's.

        Returns:
            [tokens, hidden] bfloat16, [tokens, top_k] float32 or None, and the event.
        """
        for event in (previous_event, previous_event_before_epilogue):
            begin(EventOverlap(event) if event is not None else None, async_with_compute_stream, False)
        self._objects.order.follow()
        with self._objects.rejecting("ElasticBuffer.combine"):
            self._check_handle(handle)
            check_dimensions("x", x, 2)
            if topk_weights is not None:
                check_dimensions("topk_weights", topk_weights, 1 if handle.do_expand else 2)
                if handle.do_expand and len(topk_weights) > handle._op.config.capacity:
                    raise ValueError(
                        f"topk_weights has {len(topk_weights)} rows; this rank has {handle.num_expanded_tokens}"
                    )
        op = handle._op
        self._objects.check_alive(op)
        inputs = x, *biases_of(bias)
        x, *biases = (rows.float() if op.config.combine_dtype == torch.float32 else rows for rows in inputs)
        self._objects.calls.note("combine{}: hidden {}", "" if topk_weights is None else " with weights", x.shape[-1])
        blocks = self._objects.blocks(op, num_sms or handle.num_sms)
        if topk_weights is None:
            out = op.combine(x.contiguous(), handle._handle, weighted=False, bias=biases, blocks=blocks)
            return out.bfloat16(), None, end(async_with_compute_stream)
        values = topk_weights.contiguous()
        if handle.do_expand:
            values = torch.nn.functional.pad(values, (0, op.config.capacity - len(values)))
        out, weights = op.combine_values(x.contiguous(), values, handle._handle, bias=biases, blocks=blocks)
        return out.bfloat16(), weights, end(async_with_compute_stream)


def _size(group: Any) -> int:
    """Ranks of a group that needs no world yet."""
    if isinstance(group, World):
        return group.size
    size: int = len(groups.ranks(groups.resolve(group))) if group is None or isinstance(group, str) else group.size()
    return size


def _handle_of(
    world: World, op: AllToAll, received: Dispatched, topk_idx: torch.Tensor, do_expand: bool, num_sms: int, syncs: bool,
    node_size: int, most: int,
) -> EPHandle:  # fmt: skip
    c, handle = op.config, received.handle
    at, totals = PlanOffsets(c.ranks, c.local_experts), handle.plan.totals
    counts, offsets, _ = handle.plan.counts(c.ranks, c.local_experts)
    rows = handle.rows("rank") if syncs else c.ranks * most
    expanded = (
        handle.rows("expert")
        if syncs
        else min(c.capacity, c.ranks * most * c.top_k + c.local_experts * (c.alignment - 1))
    )
    per_expert = [-(-n // c.alignment) * c.alignment for n in counts.tolist()] if syncs else []
    meta: Any = metadata(handle)
    exists = meta.source_rank >= 0
    choice = torch.arange(c.top_k, device=totals.device)
    last = torch.where(meta.topk_idx >= 0, choice, -1).amax(1)
    source = torch.stack(
        [
            torch.where(exists, meta.source_rank * most + meta.source_token, -1),
            torch.where(exists, meta.source_rank * c.top_k + last, -1).to(torch.int32),
        ],
        1,
    )
    by_place = totals[at.received : at.received + c.ranks].view(-1, node_size).sum(0, dtype=torch.int32)
    ends = by_place.cumsum(0, dtype=torch.int32)
    return EPHandle(
        do_expand, c.num_experts, c.alignment, most, num_sms, topk_idx, rows, expanded, per_expert, ends,
        offsets[:-1] + counts if do_expand else offsets[1:].clone(), counts.clone(),
        torch.cat([source, meta.expert_rows], 1)[:rows], None if do_expand else meta.topk_idx[:rows], world, op, handle,
    )  # fmt: skip


def _gaps(received: Any, rows: int) -> torch.Tensor:
    """Mask of rows without a token in an expert-major output, bool [rows]."""
    index = torch.arange(rows, dtype=torch.int32, device=received.counts.device)
    expert = torch.searchsorted(received.offsets[1:].contiguous(), index, right=True).clamp(
        max=len(received.counts) - 1
    )
    return index - received.offsets[expert] >= received.counts[expert]


def _result(tensor: torch.Tensor, rows: int, gaps: torch.Tensor | None, own: bool) -> torch.Tensor:
    """The first rows, without gaps; a new tensor unless it already is one (`own`)."""
    if gaps is not None:
        tensor.view(torch.uint8).masked_fill_(gaps[:, None], 0)
    return tensor[:rows] if own else fresh(tensor, rows)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same [rows, words] with columns that begin at multiples of 16 bytes."""
    rows, words = scales.shape
    out = scales.new_empty((words, -(-rows // 4) * 4))[:, :rows].T
    return out.copy_(scales)
