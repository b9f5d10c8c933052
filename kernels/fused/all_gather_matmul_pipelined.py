"""All-gather and matrix product at once, without a multiprocessor for the copies: torch's product for each PE's rows.

Rows travel by the GPU's copy engines, one peer after the other, while cuBLAS multiplies those at hand; a peer's rows are
multiplied when its signal says that they are here. So nothing is taken from the product, which keeps the rate of cuBLAS;
what it costs is that each PE's rows are a product of their own, and that no tile starts before all rows of its PE are
there. `all_gather_matmul.py` is the other design.

Also known as a pipelined all-gather and product: PyTorch 2.11, torch/distributed/_symmetric_memory/__init__.py,
`_pipelined_all_gather_and_consume`, which pulls the rows behind a barrier; here they are pushed behind a signal of each peer.
"""

import contextlib

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.cuda_memory import CudaMemory
from tilescale_net.runtime.profiling import named

from ..collective import as_bytes
from .matmul import SCALED, DistributedMatmul, Sides, check_extents, torch_product

PUSHES, OTHER_PRODUCTS = 0, 1  # streams beside the caller's


@tsn.jit(name="all_gather_matmul_begin")
def meet_peers(n_pes, threads):
    """Kernel `(calls, begun)`: counts the call, and ends when every PE has begun it, and so has read what came in the call
    before.

    Args of the kernel:
        calls: int64 [1], calls so far. begun: uint64 [n_pes], symmetric; each PE sets its own word.
    """

    @T.prim_func
    def main(ctx: N.Context(), calls: T.Tensor((1,), "int64"), begun: T.Tensor((n_pes,), "uint64")):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("int64")
            call = calls[0] + T.int64(1)
            if thread < n_pes:
                N.signal(begun[me], T.cast(call, "uint64"), thread)
                N.wait(begun[thread], "ge", call)
            T.sync_threads()
            if thread == 0:
                calls[0] = call

    return main


@tsn.jit(name="all_gather_matmul_await")
def await_rows(n_pes):
    """Kernel `(calls, arrived, pe)`: ends when the rows of `pe` of call `calls[0]` are there, for what follows on the stream.

    Args of the kernel: arrived: uint64 [n_pes], symmetric. pe: int32.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), calls: T.Tensor((1,), "int64"), arrived: T.Tensor((n_pes,), "uint64"), pe: T.int32
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                N.wait(arrived[pe], "ge", calls[0])

    return main


@tsn.jit(name="all_gather_matmul_put")
def put_to_peers(n_pes, nbytes, threads, signals=True):
    """Kernel `(gathered, x, calls, arrived)`: puts `x` to place `my_pe` of every other PE, with a signal.

    For PEs that no copy engine reaches: of other nodes, and of the simulator. Without `signals` only the data are there when
    the kernel ends.

    Args of the kernel:
        gathered: uint8 [n_pes, nbytes], symmetric. x: uint8 [nbytes]. calls: int64 [1].
        arrived: uint64 [n_pes], symmetric: the call whose data of each PE are there.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((n_pes, nbytes), "uint8"),
        x: T.Tensor((nbytes,), "uint8"),
        calls: T.Tensor((1,), "int64"),
        arrived: T.Tensor((n_pes,), "uint64"),
    ):
        with T.Kernel(1, threads=threads):
            me = N.my_pe()
            for hop in T.serial(1, n_pes):
                pe = (me - hop + n_pes) % n_pes  # for which these data are next
                if signals:
                    N.put_signal_block(gathered[me, :], x, pe, arrived[me], T.cast(calls[0], "uint64"))
                else:
                    N.put_block(gathered[me, :], x, pe)
            N.quiet_block()

    return main


class PipelinedAllGatherMatmul(DistributedMatmul):
    """`cat(x of all ranks) @ w`, where every rank has its own `w`; constructed and called by all ranks.

    Args:
        rows, k, n, dtype, out_dtype: as for `AllGatherMatmul`; `out_dtype` other than `dtype` is for torch.float8_e4m3fn.
        threads: of the kernels in which PEs meet and, over nodes, send, which have one block each.
        group: whose ranks these are; see `tilescale_net.world`.

    Takes n_pes * rows * k elements of the symmetric heap, and n_pes * rows scales.

    Raises:
        TypeError, ValueError: a dtype, an extent or a launch geometry that does not fit, by name.
        RankMismatch: ranks that want different ones.
        HeapError: no room for the gathered rows.
    """

    def __init__(
        self, rows: int, k: int, n: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None,
        threads: int = 512, group: "tsn.Group" = None,
    ):  # fmt: skip
        name = "PipelinedAllGatherMatmul"
        check_extents(name, dtype, rows=rows, k=k, n=n)
        if dtype != SCALED and out_dtype not in (None, dtype):
            raise TypeError(f"{name}: out_dtype is {out_dtype}; torch's product of {dtype} gives {dtype}")
        super().__init__(name, f"rows={rows}, k={k}, n={n}", dtype, out_dtype, threads, 1, group)
        self.rows, self.k, self.n = rows, k, n
        signals = ((self.n_pes,), torch.uint64)
        self.memory = self.allocate({
            "gathered": ((self.n_pes, rows, k), dtype), "begun": signals, "arrived": signals,
            **({"scales": ((self.n_pes, rows), torch.float32)} if self.scaled else {}),
        })  # fmt: skip
        self._sides = Sides(self.device, (-1, 0))

    @named("tilescale_net.PipelinedAllGatherMatmul")
    @torch.no_grad()  # torch's product into a given tensor refuses what needs a gradient; the operators have theirs
    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, *,
        x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The product of all ranks' rows with this rank's `w`; asynchronous on the current stream. As `AllGatherMatmul`'s."""
        out, _, _, scales = self._arguments(
            x, w, out, x_scales, w_scales, self.rows, self.n_pes * self.rows, self._sources_travel
        )
        parts, me = out.view(self.n_pes, self.rows, self.n), self.rank
        if self.n_pes > 1:
            self._sides.fork()
            with self._sides[PUSHES]:
                # A peer that has begun this call reads nothing of the one before any more.
                meet_peers(self.n_pes, self.threads)(self._calls, self.memory["begun"])
                sent = self._push(x, scales[0])
        torch_product(x, w, *scales, parts[me])
        for hop in range(1, self.n_pes):
            pe = (me + hop) % self.n_pes
            # Of two products in turn, the later one fills the multiprocessors that the last tiles of the earlier leave idle.
            with self._sides[OTHER_PRODUCTS] if hop % 2 else contextlib.nullcontext():
                # What has been sent tells that the peers' data are near: a wait from the start on would take a multiprocessor.
                self._sides.wait(sent[hop - 1])
                await_rows(self.n_pes)(self._calls, self.memory["arrived"], pe)
                of_rows = self.memory["scales"][pe] if self.scaled else None
                torch_product(self.memory["gathered"][pe], w, of_rows, scales[1], parts[pe])
        self._sides.join()
        return out

    def _push(self, x: torch.Tensor, x_scales: torch.Tensor) -> list:
        """Send this rank's scales, if there are any, and then its rows to all others, each with the number of the call behind
        it; marks of the stream behind what each of them gets."""
        by_engines, marks = self.device.type == "cuda" and not self._sources_travel, []
        if by_engines:
            for hop in range(1, self.n_pes):
                pe = (self.rank - hop) % self.n_pes
                if self.scaled:
                    self._copy(self.memory["scales"][self.rank], x_scales, pe)
                self._copy(self.memory["gathered"][self.rank], x, pe)
                # A kernel that signals would need a multiprocessor, which the product has taken.
                self._copy(self.memory["arrived"][self.rank : self.rank + 1], self._calls, pe)
                marks.append(self._sides.mark())
            return marks
        if self.scaled:
            self._put("scales", x_scales, signals=False)
        self._put("gathered", x, signals=True)
        return (self.n_pes - 1) * [self._sides.mark()]

    def _copy(self, there: torch.Tensor, data: torch.Tensor, pe: int) -> None:
        """Copy to symmetric memory of a peer. Copies of a stream are carried out one after the other."""
        memory = self._world.memory
        assert isinstance(memory, CudaMemory)
        memory.copy_to_peer(self._world.peer_base[pe], there, data)

    def _put(self, there: str, data: torch.Tensor, signals: bool) -> None:
        put = put_to_peers(self.n_pes, data.nbytes, self.threads, signals)
        gathered = as_bytes(self.memory[there], self.n_pes, data.nbytes)
        put(gathered, as_bytes(data, data.nbytes), self._calls, self.memory["arrived"])
