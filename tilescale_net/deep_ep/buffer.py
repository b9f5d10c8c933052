"""DeepEP's Buffer: expert-parallel communication of a group, in high-throughput and in low-latency mode."""

from collections.abc import Callable
from typing import Any

import torch

import tilescale_net as tsn
from tilescale_net.deep_ep import high_throughput, low_latency
from tilescale_net.deep_ep.groups import group_of
from tilescale_net.deep_ep.high_throughput import Bias
from tilescale_net.deep_ep.objects import Config, GroupBuffer, low_latency_bytes
from tilescale_net.deep_ep.utils import EventHandle, EventOverlap, begin, end
from tilescale_net.kernels.moe.handle import Rows
from tilescale_net.runtime.launch_args import without_default_device
from tilescale_net.runtime.profiling import named

SCRATCH = 1 << 20  # default bytes of get_local_buffer_tensor


class Buffer(GroupBuffer):
    """Communication of the ranks of a group, which construct, use and destroy it collectively.

    Args:
        group: a ProcessGroup of any backend, or another group of `tilescale_net.init`, which the constructor calls if necessary.
        num_nvl_bytes, num_rdma_bytes: their sum is the least size of the symmetric heap, if this Buffer makes it.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: no effect: both
            modes work over NVLink and over the network.
        explicitly_destroy: no effect; without `destroy` memory is freed when the program ends.
        enable_shrink: low-latency calls continue when ranks of one node are lost, see `low_latency_query_mask_buffer`.
        comm: not supported.

    Attributes:
        rank, group_size, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy: the arguments.
        runtime: None, because there is no C++ object.

    Args of methods:
        num_max_dispatch_tokens_per_rank: the most tokens of a rank in a low-latency call, equal on all ranks.
        hidden: elements of a row, a multiple of 128.
        num_experts: experts of all ranks together, equal on all ranks.
        num_ranks: ranks of the group.
        handle: of the dispatch.
        previous_event: the call begins after it.
        async_finish: return an event.
        allocate_on_comm_stream: no effect; as in DeepEP, True needs previous_event and async_finish=True (ValueError).
        dtype: of the memory.
        size: shape of the memory; default 1 MiB.
        offset, use_rdma_buffer: no effect.
        new_num_sms: SMs, an even number.
        rank_to_mask: index in the group.
        mask: whether to leave it out.
        mask_status: int32 [ranks], written.

    The first call of a kind compiles kernels and allocates memory, collectively: make it once before you capture a CUDA graph.
    Kernels and events use the current stream. Calls on different streams run one after the other, in the order in which they
    were made.

    Raises:
        TileScaleError: an unsupported feature, by name. Others: see `tilescale_net.init`.
    """

    num_sms: int = 20

    def __init__(
        self, group: "tsn.Group" = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, comm: Any = None, enable_shrink: bool = False, use_fabric: bool = False,
    ):  # fmt: skip
        if comm is not None:
            group = group_of(comm)
        super().__init__(group, num_nvl_bytes + num_rdma_bytes, enable_shrink)
        self.rank, self.group_size, self.group = self._world.rank, self._world.size, group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy

    # -- settings and sizes -----------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the GPU that they run on."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors that high-throughput calls without a Config use; an even number."""
        if not isinstance(new_num_sms, int) or new_num_sms < 2 or new_num_sms % 2:
            raise ValueError(f"set_num_sms: {new_num_sms!r} is no positive even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The configuration of dispatch, the same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """As `get_dispatch_config`, of combine."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency calls of this shape need, in BF16 and in FP8 together."""
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Scratch memory of `size` bytes or 1 MiB; no call of this Buffer uses it, so clearing it has no effect."""
        shape = (SCRATCH // dtype.itemsize,) if size is None else size
        return torch.zeros(shape, dtype=dtype, device=self._world.device)

    # -- high throughput --------------------------------------------------------------------------------------------

    @without_default_device
    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """The arguments of `dispatch` besides the rows, from the choices of each token.

        Args:
            topk_idx: [tokens, top_k] expert of each choice, -1 for none.

        Returns:
            Tokens per rank [ranks] int32; per node [nodes] int32, None with one node; per expert [num_experts] int32;
            whether each token goes to each rank [tokens, ranks] bool; and the event.
        """
        begin(previous_event, async_finish, allocate_on_comm_stream)
        per_rank, per_expert, in_rank = high_throughput.layout(topk_idx, num_experts, self.group_size)
        nodes = self._world.topology.nodes
        per_node = None
        if nodes > 1:
            per_node = in_rank.view(len(in_rank), nodes, self.group_size // nodes).any(2).sum(0, dtype=torch.int32)
        return per_rank, per_node, per_expert, in_rank, end(async_finish)

    @without_default_device
    def dispatch(
        self, x: Rows, handle: tuple | None = None, num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None, is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, tuple | None, EventOverlap]:  # fmt: skip
        """Send each token once to each rank of its experts. Collective.

        Args:
            x: [tokens, hidden] bfloat16, or a pair of float8_e4m3fn rows and scales, [tokens, any] or [tokens], float32 or
                int32, of any strides.
            handle: of an earlier dispatch, whose routing is used again; pass no other argument about the routing.
            is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`.
            num_tokens_per_rank, num_tokens_per_rdma_rank: ignored.
            topk_idx, topk_weights: sent with the rows. Without them `is_token_in_rank` has the target ranks.
            expert_alignment: counts per expert are rounded up to a multiple of it.
            num_worst_tokens: rows of the results, so that the host need not wait for their number: equal on all ranks, a
                multiple of the number of ranks, at least the rows that any rank sends or receives. It is not checked.
            config: its num_sms.
            previous_event: the call begins after it.
            async_finish: return an event.

        Returns:
            The rows as `x` (new contiguous tensors, ordered by source rank and token); local experts of their choices, -1 for those of
            other ranks, and the weights, 0 there; list of rows per local expert (empty with `num_worst_tokens`); handle;
            event. Missing results are None, with a handle or without choices.

        Raises:
            ValueError, TypeError, HeapError: as `kernels.moe.AllToAll.dispatch`, on all ranks.
        """
        with self._objects.rejecting("Buffer.dispatch"):
            begin(previous_event, async_finish, allocate_on_comm_stream)
            num_sms = self._num_sms(config)
            routing = None if handle is None else high_throughput.routing_of(self._objects, handle)
            if routing is not None and (topk_idx is not None or topk_weights is not None):
                raise ValueError("a handle stands for the choices; give no topk_idx and topk_weights with it")
            high_throughput.check_rows(x)
            if routing is None:
                high_throughput.check_routing(
                    is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment
                )
        if routing is not None:
            rows = high_throughput.dispatch_again(self._objects, x, routing, num_sms)
            return rows, None, None, None, None, end(async_finish)
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        rows, recv_idx, recv_weights, counts, prefix, routing = high_throughput.dispatch(
            self._objects, x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, expert_alignment,
            num_worst_tokens, num_sms,
        )  # fmt: skip
        return rows, recv_idx, recv_weights, counts, (prefix, is_token_in_rank, routing), end(async_finish)

    @without_default_device
    def combine(
        self, x: torch.Tensor, handle: tuple, topk_weights: torch.Tensor | None = None, bias: Bias = None,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Sum the rows of each token over the ranks that have one. Collective; a handle serves any number of times.

        Args:
            x: [rows, hidden] bfloat16, in the order of dispatch's rows.
            handle: of that dispatch.
            topk_weights: [rows, top_k] float32, summed for each token and choice.
            bias: one or two tensors [tokens, hidden] bfloat16, added before the sum is rounded.
            config: its num_sms, at most the dispatch's.

        Returns:
            [tokens, hidden] bfloat16, [tokens, top_k] float32 or None, and the event.
        """
        with self._objects.rejecting("Buffer.combine"):
            begin(previous_event, async_finish, allocate_on_comm_stream)
            num_sms, routing = self._num_sms(config), high_throughput.routing_of(self._objects, handle)
            high_throughput.check_combined(routing, x, topk_weights)
        out, weights = high_throughput.combine(self._objects, x, routing, topk_weights, bias, num_sms)
        return out, weights, end(async_finish)

    @staticmethod
    def _num_sms(config: Config | None) -> int:
        if not isinstance(config, Config | None):
            raise TypeError(f"config must be a Config, not {type(config).__name__}")
        return Buffer.num_sms if config is None else config.num_sms

    # DeepEP's calls between nodes have the same interface except for parts of the handle: here they are the same calls.
    internode_dispatch, internode_combine = dispatch, combine

    # -- low latency ------------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """No effect: the modes share no memory, and signals are never reset."""

    @named("tilescale_net.deep_ep.low_latency_dispatch")
    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None, use_fp8: bool = True, round_scale: bool = False,
        use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, tuple, EventOverlap, Callable[[], None] | None]:  # fmt: skip
        """Send each token to its experts. Collective.

        Args:
            x: [tokens, hidden] bfloat16, up to `num_max_dispatch_tokens_per_rank` tokens.
            num_max_dispatch_tokens_per_rank: up to 1024, equal on all ranks.
            topk_idx: [tokens, top_k] expert of each choice, -1 for none.
            cumulative_local_expert_recv_stats: [local experts] int32, to which the counts are added.
            use_fp8: rows travel as float8_e4m3fn with a scale per 128 elements.
            round_scale: scales are powers of two.
            use_ue8m0: four exponents of these scales to an int32.
            return_recv_hook: return a function that ends the call; two dispatches may be pending.
            dispatch_wait_recv_cost_stats: [ranks] int64, to which the call adds the GPU clocks that its threads have waited
                for each rank.

        Returns:
            [local experts, ranks * max tokens, hidden] bfloat16, or a pair of float8_e4m3fn and scales (column-major);
            rows per local expert, int32; handle; event; hook or None. The handle has five parts: the token at the source of
            each row, [local experts, ranks * max tokens] int32; begin << 32 | count of each rank's rows, [local experts,
            ranks] int64; max tokens, hidden, experts. Combines take the handle itself, not a tuple of its parts.
        """
        if async_finish and return_recv_hook:
            with self._objects.rejecting("Buffer.low_latency_dispatch"):
                raise ValueError("give async_finish or return_recv_hook, not both")
        rows, counts, handle, hook = low_latency.dispatch(
            self._objects, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            use_fp8, round_scale, use_ue8m0, return_recv_hook, dispatch_wait_recv_cost_stats,
        )  # fmt: skip
        return rows, counts, handle, end(async_finish), hook

    @named("tilescale_net.deep_ep.low_latency_combine")
    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: tuple,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: torch.Tensor | None = None, combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:  # fmt: skip
        """Sum the rows of each token times its weights. Collective; a handle serves any number of times.

        Args:
            x: [local experts, ranks * max tokens, hidden] bfloat16.
            topk_idx: ignored: the handle has the choices.
            topk_weights: [tokens, top_k] float32, or another floating dtype, which is copied to float32.
            handle: of a dispatch that has ended, of this buffer or another one of its group.
            zero_copy: take the rows from `get_next_low_latency_combine_buffer` instead of `x`.
            return_recv_hook: return a function that ends the call; two combines may be pending.
            out: [tokens, hidden] bfloat16; default a new tensor.
            use_logfmt: ignored: rows travel as bfloat16, which is more exact, and longer.
            combine_wait_recv_cost_stats: as `dispatch_wait_recv_cost_stats` of `low_latency_dispatch`.

        Returns:
            [tokens, hidden] bfloat16, event, hook or None.
        """
        if async_finish and return_recv_hook:
            with self._objects.rejecting("Buffer.low_latency_combine"):
                raise ValueError("give async_finish or return_recv_hook, not both")
        result, hook = low_latency.combine(
            self._objects, x, topk_weights, handle, out, zero_copy, return_recv_hook, combine_wait_recv_cost_stats
        )
        return result, end(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """Rows that `low_latency_combine(zero_copy=True)` reads, [local experts, ranks * max tokens, hidden] bfloat16."""
        return low_latency.checked(handle).combine_buffer

    # -- ranks that are masked ----------------------------------------------------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of the next low-latency calls, on all remaining ranks; or (`mask` false) withdraw a request that has
        not taken effect. A rank that masks itself must make no further calls.

        Raises:
            TileScaleError: a rank that was left out cannot return.
        """
        self._objects.masks.update(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fill `mask_status` [ranks] with 1 for masked ranks (by the caller or because they are lost), else 0.

        With enable_shrink a rank that dies, or does not arrive within TSN_TIMEOUT, is lost. Low-latency calls in flight then
        return no rows and zeros on all others, and later calls continue without it: repeat the step if the mask has changed.
        """
        self._objects.masks.query(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Mask only the ranks that have been left out: they cannot return, and a warning names them."""
        self._objects.masks.clean()
