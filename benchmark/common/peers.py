"""Other implementations of all-reduce, each a column if its package is installed, else skipped by name.

FlashInfer's kernels are called as in its own tests; all of them in CUDA graphs, with results compared like ours.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tilescale_net as tsn
from benchmark.common.measuring import gather
from benchmark.common.modules import dist, symmetric_memory, torch

HIDDEN = 8192  # elements of a token, of kernels that take tokens
MOST_TOKENS = 2048
ONE_SHOT_BYTES = 64 << 20  # of all ranks together: limit of FlashInfer's one-shot kernel
TORCH_ONE_SHOT_BYTES = 4 << 20
VLLM_BLOCKS = 36  # its limit


class Unsuitable(Exception):
    """An implementation does not take this call; with the reason."""


class Operands(NamedTuple):
    """Of an all-reduce: `out` becomes the sum of all ranks' `x`; both [count], apart. `group` uses NCCL."""

    x: Any
    out: Any
    group: Any


class Made(NamedTuple):
    """The function of one call, and the tensors that it uses instead of the operands `x` and `out`."""

    run: Callable[[], object]
    x: Any = None
    out: Any = None


class Peer(NamedTuple):
    """An implementation. `key`: of its column. title: its name. `make`: of the operands; collective. Raises ImportError
    if it is not installed, Unsuitable if it does not take this call."""

    key: str
    title: str
    make: Callable[[Any], Made]


def symmetric_like(x: Any, group: Any) -> tuple[Any, Any]:
    """A tensor of torch's symmetric memory like `x`, and its handle. Collective."""
    found = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=x.device)
    return found, symmetric_memory.rendezvous(found, group.group_name)


def _torch_one_shot(call: Operands) -> Made:
    if call.x.nbytes > TORCH_ONE_SHOT_BYTES:
        raise Unsuitable("takes far longer than its other way")
    mine, _ = symmetric_like(call.x, call.group)
    name = call.group.group_name
    return Made(lambda: torch.ops.symm_mem.one_shot_all_reduce_out(mine, "sum", name, call.out), mine)


def _torch_two_shot(call: Operands) -> Made:
    mine, _ = symmetric_like(call.x, call.group)
    name = call.group.group_name
    return Made(lambda: torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", name), mine, mine)


def _nccl_registered(call: Operands) -> Made:
    """NCCL on a buffer of a pool that is registered as symmetric memory of the communicator (NCCL 2.27 and later)."""
    backend = call.group._get_backend(call.x.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        mine = torch.empty_like(call.x)
    dist.all_reduce(call.out, group=call.group)  # there is a communicator from the first call on
    backend.register_mem_pool(pool, symm=True)
    # Graphs may hold its tensors. It is never freed: at the end of the process it would use a destroyed communicator.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return Made(lambda: dist.all_reduce(mine, group=call.group), mine, mine)


_workspaces: dict[Any, Any] = {}


def flashinfer_workspace(group: Any) -> tuple[Any, Any]:
    """The pointers and the description of FlashInfer's workspace, for bfloat16 and float16. Collective; made once."""
    from flashinfer.comm import trtllm_ar

    if group not in _workspaces:
        _workspaces[group] = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            dist.get_rank(group), dist.get_world_size(group), MOST_TOKENS, HIDDEN, group=group, create_metadata=True
        )
    return _workspaces[group][1:]


def flashinfer_fusion(call: Operands, tokens: int, hidden: int, one_shot: bool, **fused: Any) -> Callable[[], None]:
    """A call of FlashInfer's kernel of TensorRT-LLM, launched programmatically dependent, as its own benchmark does.
    `fused`: pattern_code, and the arguments of its pattern. Raises Unsuitable: a number of tokens or bytes that the
    kernel does not take."""
    from flashinfer.comm import trtllm_ar

    ranks = dist.get_world_size(call.group)
    if tokens * hidden > MOST_TOKENS * HIDDEN or call.x.dtype not in (torch.bfloat16, torch.float16):
        raise Unsuitable(f"takes up to {MOST_TOKENS} x {HIDDEN} elements of 16 bits here")
    if one_shot and call.x.nbytes * ranks > ONE_SHOT_BYTES:
        raise Unsuitable(f"takes up to {ONE_SHOT_BYTES >> 20} MiB of all ranks together")
    if not one_shot and tokens <= ranks:
        raise Unsuitable("takes more tokens than ranks")
    pointers, described = flashinfer_workspace(call.group)
    options: dict[str, Any] = dict.fromkeys(
        ("allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps",
         "scale_factor", "layout_code")
    )  # fmt: skip
    options |= dict(
        allreduce_in=call.x.view(tokens, hidden), world_size=ranks, world_rank=dist.get_rank(call.group), token_num=tokens,
        hidden_dim=hidden, workspace_ptrs=pointers, launch_with_pdl=True, trigger_completion_at_end=True, fp32_acc=True,
        use_oneshot=one_shot, metadata=described, **fused,
    )  # fmt: skip
    return lambda: trtllm_ar.trtllm_allreduce_fusion(**options)


def _flashinfer(call: Operands, one_shot: bool) -> Made:
    if call.x.numel() % HIDDEN:
        raise Unsuitable(f"takes multiples of {HIDDEN} elements here")
    tokens = call.x.numel() // HIDDEN
    out = call.out.view(tokens, HIDDEN)
    return Made(flashinfer_fusion(call, tokens, HIDDEN, one_shot, pattern_code=0, allreduce_out=out))


def _vllm(call: Operands) -> Made:
    """vLLM's custom all-reduce, in the copy that FlashInfer ships. It reads the peers' addresses from a table of one
    row per captured call, which vLLM fills after the capture by CUDA IPC. All calls here read the same tensor, so that
    all rows are alike and are filled before."""
    from flashinfer.comm import vllm_ar

    ranks = dist.get_world_size(call.group)
    if ranks % 2 or ranks > 8:
        raise Unsuitable("takes 2, 4, 6 or 8 ranks")
    mine, handle = symmetric_like(call.x, call.group)
    signals, of_signals = symmetric_like(
        torch.empty(vllm_ar.meta_size() + call.x.nbytes, dtype=torch.uint8, device=call.x.device), call.group
    )
    signals.zero_()
    torch.cuda.synchronize()
    dist.barrier(group=call.group)
    places = list(handle.buffer_ptrs)
    table = torch.tensor([places + [0] * (8 - ranks)] * 4096, dtype=torch.int64, device=call.x.device)
    op = vllm_ar.init_custom_ar(list(of_signals.buffer_ptrs), table.view(torch.uint8), dist.get_rank(call.group), True)
    vllm_ar.register_buffer(op, places)
    kept = signals, of_signals, handle, table

    def run() -> None:
        assert kept
        vllm_ar.all_reduce(op, mine, call.out, 0, 0, VLLM_BLOCKS)

    return Made(run, mine)


def _flashinfer_fp8(call: Operands) -> Made:
    from flashinfer.comm.quantized_allreduce import quantized_all_reduce

    if call.x.dtype != torch.bfloat16 or call.x.numel() < 4096:
        raise Unsuitable("takes bfloat16, 4096 elements and more")
    return Made(lambda: quantized_all_reduce(call.x, call.group, output=call.out))


ALL_REDUCE = (
    Peer("symm_one_us", "torch one-shot", _torch_one_shot),
    Peer("symm_two_us", "torch two-shot", _torch_two_shot),
    Peer("nccl_registered_us", "NCCL registered", _nccl_registered),
    Peer("flashinfer_one_us", "FlashInfer one-shot", lambda call: _flashinfer(call, True)),
    Peer("flashinfer_two_us", "FlashInfer two-shot", lambda call: _flashinfer(call, False)),
    Peer("vllm_us", "vLLM custom", _vllm),
)
ALL_REDUCE_FP8 = Peer("flashinfer_fp8_us", "FlashInfer FP8", _flashinfer_fp8)


def nccl_over_nodes() -> str:
    """Make NCCL treat the nodes of one host as hosts, which it connects by sockets, as the fabric connects ours. Call
    it before NCCL's first communicator. The user's settings take precedence. Returns text for reports behind NCCL's
    version; empty on one node, and if nodes are hosts."""
    topology = tsn.world().topology
    if topology.nodes == 1 or not topology.single_host:
        return ""
    wanted = {"NCCL_HOSTID": f"{socket.gethostname()}-{topology.node_members.start}", "NCCL_NET": "Socket"}
    if len(topology.sizes) == topology.size:
        wanted |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return f", {os.environ['NCCL_NET']} between nodes"


def nccl_version() -> str:
    """Version of the loaded library, which may differ from the one that torch was built with."""
    try:
        found = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
        number = found.value
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except (OSError, AttributeError):
        return ".".join(map(str, torch.cuda.nccl.version()))


def made(peer: Peer, operands: Any) -> Made | str:
    """`peer.make`, or in one line the reason why some rank cannot make it. Collective."""
    found, error = None, None
    try:
        found = peer.make(operands)
    except Exception as err:  # any exception of another package
        error = (str(err) or type(err).__name__).splitlines()[0][:120]
    errors: Sequence[str] = [told for told in gather(error) if told]
    if errors or found is None:
        return errors[0]
    return found
