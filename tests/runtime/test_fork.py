"""A child made by fork is no rank: every call of every object refuses there at once, and the job goes on unharmed."""

import inspect
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.integration import test_order as order
from tests.kernels.moe.support import without_kernels
from tilescale_net import deep_ep
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.kernels.all_to_all import AllToAll as EvenAllToAll
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed
from tilescale_net.kernels.attention_merge import AttentionMerge
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.collective import Collective
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul, PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul, ScaledExpertMatmul
from tilescale_net.kernels.fused.gemm import Tiling
from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter
from tilescale_net.kernels.fused.scaled_gemm import SIMULATED, ScaledTiling
from tilescale_net.kernels.moe import AllToAll, Arena
from tilescale_net.kernels.reduce_scatter import ReduceScatter
from tilescale_net.kernels.send_recv import SendRecv
from tilescale_net.runtime.cuda_memory import CudaMemory
from tilescale_net.runtime.heap import Memory
from tilescale_net.runtime.simulator import SimulatorMemory
from tilescale_net.runtime.world import World

# What answers in a child too: it asks nobody, and launches nothing.
LOCAL = {
    "heap_offset", "aligned_offset", "place", "place_of_vectors", "tracked_by", "ordered_by", "counters", "allocate", "replace",
    "prepared",
}  # fmt: skip
LOCAL_OF = {
    AllToAll: {"heap_bytes", "arena_bytes", "checked_list", "kernels_of_tiles", "adds_to", "takes"},
    AllReduce: {"is_faster_overwritten", "is_copied_in_pieces"},
    AllReduceNorm: {"new_scales"},
    ReduceScatter: {"takes_any_memory"},
    AllGather: {"takes_any_memory"},
    EvenAllToAll: {"takes_any_memory"},
    **{
        kind: {"kernels"}
        for kind in (AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce, ExpertMatmul, ScaledExpertMatmul)
    },
    Arena: {"place", "join", "enter", "reset"},
    # How the package ends a world.
    World: {"abort", "announce", "close", "end_in_child", "fail", "give_up", "wait_for_others", "write_context"},
}
TILING = Tiling(tile=(32, 32, 16), stages=2, panel=2, columns=16)
ROWS = 32


def _in_child(function):
    """The result of `function` in a forked child."""
    theirs, mine = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = function()
        os.write(mine, pickle.dumps(found))
        os._exit(0)
    os.close(mine)
    with open(theirs, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert said and status == 0, f"the child ended with status {status}"
    return pickle.loads(said)


def _accepted(calls: dict) -> list[str]:
    """The calls that do not refuse as a child's are to."""
    wrong = []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for name, call in calls.items():
        signal.alarm(10)
        try:
            call()
            wrong.append(f"{name} returned")
        except tsn.TileScaleError as error:
            if "forked from a rank" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return wrong


def _methods(obj) -> dict:
    """Its public calls, with None for each argument that has no default: they refuse before they look at arguments."""
    cls = type(obj)
    local = (LOCAL if isinstance(obj, Collective) else set()) | LOCAL_OF.get(cls, set())
    calls = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if not inspect.isfunction(value) or name in local or (name.startswith("_") and name != "__call__"):
            continue
        needed = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty]
        arguments = [None for p in needed[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
        calls[f"{cls.__name__}.{name}"] = lambda name=name, arguments=arguments: getattr(obj, name)(*arguments)
    return calls


def _leaves(cls) -> set[type]:
    return {leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)} or {cls}


def _objects() -> list:
    small = dict(threads=64, blocks=2)
    product = dict(rows=64, k=32, n=32)
    moe = AllToAll(4, 8, 64, 2, tile_rows=ROWS, alignment=ROWS, capacity=8 * ROWS)
    scaled = ScaledTiling() if ranks.gpus() else SIMULATED
    moe_fp8 = AllToAll(4, 8, 512, 2, torch.float8_e4m3fn, tile_rows=scaled.tile[0], alignment=scaled.tile[0])
    fused = [kind(**product, tiling=TILING) for kind in (AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce)]
    made = [
        moe, AllToAll(4, 4, 64, 2, mode="latency"), AllGather(**small), AllReduce(**small), AllReduceNorm(64, **small),
        EvenAllToAll(**small), AllToAllTransposed(**small), Broadcast(**small), ReduceScatter(**small), SendRecv(**small),
        AttentionMerge(**small), *fused, PipelinedAllGatherMatmul(**product), ExpertMatmul(moe, 64, 32, tiling=TILING),
        ScaledExpertMatmul(moe_fp8, 512, 64, tiling=scaled),
    ]  # fmt: skip
    assert {type(op) for op in made} >= {c for c in _leaves(Collective) if "tests" not in c.__module__}
    return [*made, Arena(4096), tsn.world()]


def _step(op):
    x = torch.ones((4, 64), dtype=torch.bfloat16)
    received = op.dispatch(x, torch.tensor([[0, 3]] * 4), torch.ones((4, 2)))
    assert (op.combine(received.x, received.handle) == 2).all()


@without_kernels()  # a few of each object's are called
def _walk():
    made = _objects()
    (moe, latency), x = made[:2], torch.ones((4, 64), dtype=torch.bfloat16)
    idx, weights = torch.tensor([[0, 3]] * 4), torch.ones((4, 2))
    _step(moe), _step(latency)
    layer = tsn.ops.moe_layer(4, 4, 64, 2)
    received = tsn.ops.moe_dispatch(layer, x, idx, weights)
    tsn.ops.all_reduce(x)
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD, 1 << 20), deep_ep.ElasticBuffer(dist.group.WORLD)
    *_, handle, _, hook = buffer.low_latency_dispatch(x.repeat(1, 2), idx, 4, 4, use_fp8=False, return_recv_hook=True)
    pending = latency.dispatch_send(x, idx, weights)
    to = (tsn.rank() + 1) % tsn.size()
    kernel, words = order.message(), tsn.zeros(1, torch.uint64)
    tensors = *(tsn.zeros(order.COUNT) for _ in range(3)), words
    kernel(*tensors, 1, to)
    launch = kernel.launcher(tsn.world())
    launch(*tensors, 2, to)
    context, kept, world = tsn.world().context_tensor, tsn.zeros(4), tsn.world()
    kept.fill_(7)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    mask = torch.zeros(tsn.size(), dtype=torch.int32)
    ops = tsn.ops
    calls = {
        **{f"tsn.{n}": getattr(tsn, n) for n in ("rank", "size", "team", "device", "world", "barrier", "shrink")},
        **{f"tsn.{n}": getattr(tsn, n) for n in ("synchronize", "check", "stats", "init")},
        **{f"tsn.{n} of a World": lambda n=n: getattr(tsn, n)(group=world) for n in ("rank", "barrier", "finalize")},
        "tsn.empty": lambda: tsn.empty(3),
        "tsn.zeros": lambda: tsn.zeros(3),
        "tsn.free": lambda: tsn.free(kept),
        "kernel": lambda: kernel(*tensors, 3, to),
        "kernel with a context": lambda: kernel(context, *tensors, 3, to),
        "launcher": lambda: launch(*tensors, 3, to),
        "dispatch_recv": lambda: latency.dispatch_recv(pending),
        "Buffer": lambda: deep_ep.Buffer(dist.group.WORLD, 1 << 20),
        "hook": hook,
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x.repeat(1, 2), idx, 4, 4, use_fp8=False),
        "low_latency_combine": lambda: buffer.low_latency_combine(x, idx, weights, handle),
        "Buffer.dispatch": lambda: buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
        ),
        "Buffer.destroy": buffer.destroy,
        "mask": lambda: buffer.low_latency_update_mask_buffer(1, True),
        "query": lambda: buffer.low_latency_query_mask_buffer(mask),
        "clean": buffer.low_latency_clean_mask_buffer,
        "ElasticBuffer.dispatch": lambda: elastic.dispatch(x, idx, weights, num_experts=4, num_max_tokens_per_rank=4),
        "ElasticBuffer.barrier": elastic.barrier,
        "ElasticBuffer.destroy": elastic.destroy,
        **{f"ops.{n}": lambda n=n: getattr(ops, n)(x) for n in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")},
        "ops.check": ops.check,
        "ops.send": lambda: ops.send(x, to),
        "ops.recv": lambda: ops.recv(x, to),
        "ops.matmul_all_reduce": lambda: ops.matmul_all_reduce(x, x.t()),
        "ops.matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(x, x.t()),
        "ops.all_gather_matmul": lambda: ops.all_gather_matmul(x, x.t()),
        "ops.moe_layer": lambda: ops.moe_layer(4, 4, 64, 2),
        "ops.moe_dispatch": lambda: ops.moe_dispatch(layer, x, idx, weights),
        "ops.moe_combine": lambda: ops.moe_combine(layer, received.x, received),
    }  # fmt: skip
    for obj in made:
        calls |= _methods(obj)

    def child():
        seen = kept.tolist()
        kept.fill_(9)  # its own, as all ordinary memory is
        return _accepted(calls), seen

    found = _in_child(child) if tsn.rank() == 0 else ([], [7.0] * 4)
    tsn.barrier()
    latency.dispatch_recv(pending)
    hook()
    kernel(*tensors, 3, to)
    _step(moe), _step(latency)
    return found, kept.tolist()


@pytest.mark.parametrize("memory", [CudaMemory, SimulatorMemory])
def test_memory_of_every_kind_knows_of_a_child(memory):
    calls = {name for name, call in vars(Memory).items() if inspect.isfunction(call) and not name.startswith("_")}
    assert "part" in calls and [name for name in calls if not hasattr(memory, name)] == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_child_made_by_fork_reaches_nothing(nodes):
    env = {"TSN_DEVICE": "simulator", "VIRTUAL_NODES": str(nodes)}
    for (accepted, seen), kept in ranks.run(2, _walk, env=env, heap="64M"):
        assert accepted == [] and seen == kept == [7.0] * 4, "\n".join(accepted)
