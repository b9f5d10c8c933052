"""07: a GEMM that begins before all rows have arrived, in four steps.

Every rank has some rows of the left matrix and some columns of the right one, and multiplies all rows by its columns:
the first half of a tensor-parallel layer. The bound is the longer of two times: the multiplications on the tensor cores,
or the transfer of the rows over the links. How close does each step come to this bound?

1. **The GEMM alone.** An ordinary tilelang kernel, one tile per block, with all rows present. It is the reference: later
   steps cannot be faster.
2. **Gather, then multiply.** `push` puts this rank's rows into the matrix of every other rank, with a signal for each row
   of tiles, and waits for the rows of the others; the GEMM follows on the stream. The times add up.
3. **A wait for each tile.** Each block of the GEMM waits only for the rows of its tile, and the blocks begin with this
   rank's own rows. `push` no longer waits: rows of the others arrive during the GEMM. Only this rank's sending still
   precedes the GEMM.
4. **A persistent GEMM, with the copy beside it.** One kernel with one block per SM: some blocks send, the others take
   tiles in the order in which rows arrive. Nothing precedes the GEMM any more; its cost is the sending SMs, a few of a
   hundred.

Three details matter. Puts go hop by hop: a rank's rows go first to the rank that needs them next, and no link has two
senders at a time. Step 4 cannot hang, because all its blocks run at the same time; a kernel with more blocks could fill
the GPU with waiting blocks. T.copy uses ordinary accesses in kernels that communicate, and a wait orders those; a read
by TMA (T.tma_copy) needs a wait with `proxy="async"`.

On GPUs, each step prints its time and its share of the bound; the simulator prints the bound for the shape of the GPUs,
and checks the results. docs/results/products.md has the output of two H100s.
tilescale_net.kernels.fused.all_gather_matmul improves on step 4: two warpgroups multiply while a warp copies, blocks take
tiles from a counter, and two halves of the gathered matrix alternate instead of a barrier.
"""

import statistics

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

FLOPS, LINK = 989e12, 450e9  # bfloat16 of an H100 or H200, and bytes per second of its NVLinks, one way
SENDERS, THREADS = 8, 256
BIG = dict(rows=4096, n=14336, k=8192, tile=(128, 256, 64), stages=4)  # of a rank
SMALL = dict(rows=64, n=64, k=64, tile=(32, 32, 32), stages=2)


@tsn.macro
def send(gathered, arrived, turn, block, blocks, rows, k, height):
    """Put this PE's rows, `height` at a time, to every other PE, by `blocks` blocks."""
    me = N.my_pe()
    for hop in T.serial(1, N.n_pes()):
        pe = (me - hop + N.n_pes()) % N.n_pes()  # it needs these rows next
        for i in T.serial(T.ceildiv(rows // height, blocks)):
            c = i * blocks + block
            if c < rows // height:
                mine = gathered[me, c * height, 0]
                N.put_signal_block(mine, mine, pe, arrived[me, c], turn, count=height * k, engine="ldst")
        N.quiet_block(pe)


@tsn.macro
def multiply(gathered, w, out, arrived, turn, left, right, total, pe, row, column, k, stages):
    """One tile of the GEMM, after its rows have arrived; with `turn` 0 at once."""
    if pe != N.my_pe():
        N.wait_block(arrived[pe, row // left.shape[0]], "ge", turn)
    T.clear(total)
    for i in T.Pipelined(T.ceildiv(k, left.shape[1]), num_stages=stages):
        T.copy(gathered[pe, row, i * left.shape[1]], left)
        T.copy(w[i * left.shape[1], column], right)
        T.gemm(left, right, total)
    T.copy(total, out[pe, row, column])


@tsn.jit
def push(n_pes, rows, k, height):
    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((n_pes, rows, k), "bfloat16"),  # symmetric; this PE's rows are in their place
        arrived: T.Tensor((n_pes, rows // height), "uint64"),  # symmetric: signals
        turn: T.int64,
        waits: T.int32,
    ):
        with T.Kernel(SENDERS, threads=THREADS) as block:
            send(gathered, arrived, turn, block, SENDERS, rows, k, height)
            if waits > 0:
                for i in T.serial(n_pes * (rows // height)):
                    if i // (rows // height) != N.my_pe():
                        N.wait_block(arrived[i // (rows // height), i % (rows // height)], "ge", turn)

    return main


@tsn.jit
def product(n_pes, rows, n, k, tile, stages):
    bm, bn, bk = tile

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((n_pes, rows, k), "bfloat16"),
        w: T.Tensor((k, n), "bfloat16"),
        out: T.Tensor((n_pes, rows, n), "bfloat16"),
        arrived: T.Tensor((n_pes, rows // bm), "uint64"),
        turn: T.int64,
    ):
        with T.Kernel(rows // bm, n // bn, n_pes, threads=THREADS) as (y, x, hop):
            left, right = T.alloc_shared((bm, bk), "bfloat16"), T.alloc_shared((bk, bn), "bfloat16")
            total = T.alloc_fragment((bm, bn), "float32")
            pe = (N.my_pe() + hop) % n_pes
            multiply(gathered, w, out, arrived, turn, left, right, total, pe, y * bm, x * bn, k, stages)

    return main


@tsn.jit
def persistent(n_pes, rows, n, k, tile, stages, blocks):
    bm, bn, bk = tile
    height, width = rows // bm, n // bn  # in tiles
    workers = blocks - SENDERS

    @T.prim_func
    def main(
        ctx: N.Context(),
        gathered: T.Tensor((n_pes, rows, k), "bfloat16"),
        w: T.Tensor((k, n), "bfloat16"),
        out: T.Tensor((n_pes, rows, n), "bfloat16"),
        arrived: T.Tensor((n_pes, rows // bm), "uint64"),
        turn: T.int64,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            left, right = T.alloc_shared((bm, bk), "bfloat16"), T.alloc_shared((bk, bn), "bfloat16")
            total = T.alloc_fragment((bm, bn), "float32")
            if block < SENDERS:
                send(gathered, arrived, turn, block, SENDERS, rows, k, bm)
            else:
                for i in T.serial(T.ceildiv(n_pes * height * width, workers)):
                    tile_number = i * workers + block - SENDERS
                    if tile_number < n_pes * height * width:
                        pe = (N.my_pe() + tile_number // (height * width)) % n_pes
                        y, x = tile_number % height, tile_number // height % width
                        multiply(gathered, w, out, arrived, turn, left, right, total, pe, y * bm, x * bn, k, stages)

    return main


class Layer:
    """One rank's matrices, and the four ways to their GEMM."""

    def __init__(self, rows, n, k, tile, stages):
        size, rank, device = tsn.size(), tsn.rank(), tsn.device()
        generator = torch.Generator(device=device).manual_seed(7)
        everyone = torch.randn((size, rows, k), generator=generator, device=device).bfloat16()
        self.w = (torch.randn((k, n), generator=generator, device=device) / k**0.5).bfloat16()
        self.gathered, self.arrived = (
            tsn.zeros((size, rows, k), torch.bfloat16),
            tsn.zeros((size, rows // tile[0]), torch.uint64),
        )
        self.everyone, self.mine, self.turn = everyone, slice(rank, rank + 1), 0
        self.out = torch.zeros((size, rows, n), dtype=torch.bfloat16, device=device)
        on_gpu = device.type == "cuda"
        blocks = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else SENDERS + 2
        self.push, self.product = push(size, rows, k, tile[0]), product(size, rows, n, k, tile, stages)
        self.persistent = persistent(size, rows, n, k, tile, stages, blocks)

    def multiply(self, kernel, turn):
        kernel(self.gathered, self.w, self.out, self.arrived, turn)

    def alone(self):
        self.multiply(self.product, 0)

    def gather_then_multiply(self):
        self.push(self.gathered, self.arrived, self.turn, 1)
        self.multiply(self.product, 0)

    def wait_for_each_tile(self):
        self.push(self.gathered, self.arrived, self.turn, 0)
        self.multiply(self.product, self.turn)

    def copy_beside(self):
        self.multiply(self.persistent, self.turn)

    def call(self, step):
        """One call of a step, with only what it may rely on in `gathered`; its time in seconds on a GPU, else None."""
        self.turn += 1  # signals of this call are larger than those of all before
        there = slice(None) if step == self.alone else self.mine
        self.gathered.fill_(float("nan"))
        self.gathered[there] = self.everyone[there]
        self.out.zero_()
        tsn.barrier()  # no rank puts before all are ready, and all are through with the call before
        if self.out.device.type != "cuda":
            return step()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def check(self):
        expected = self.everyone.float() @ self.w.float()
        assert ((self.out.float() - expected).abs().max() < 0.02 * expected.abs().max()).item(), "the product is wrong"


def seconds(size, rows, n, k):
    """Of the multiplications, and of the rows that come from others, at the GPU's and its links' best."""
    return 2 * size * rows * n * k / FLOPS, 2 * (size - 1) * rows * k / LINK


def told(times, bound):
    middle = statistics.median(times)
    return f"{middle * 1e6:.0f} us, {100 * bound / middle:.0f} % of the bound"


def main():
    on_gpu = tsn.init(1 << 30).device_kind == "cuda"
    shape = BIG if on_gpu else SMALL
    layer, rank = Layer(**shape), tsn.rank()
    multiplying, moving = seconds(tsn.size(), *(BIG[extent] for extent in ("rows", "n", "k")))
    bound = max(multiplying, moving)
    if rank == 0:
        print(f"bound on GPUs: {bound * 1e6:.0f} us ({moving * 1e6:.0f} us for the rows)", flush=True)
    for step in (layer.alone, layer.gather_then_multiply, layer.wait_for_each_tile, layer.copy_beside):
        times = [layer.call(step) for _ in range(10 if on_gpu else 2)]
        layer.check()
        tsn.barrier()
        if rank == 0:
            print(f"{step.__name__.replace('_', ' ')}: {told(times, bound) if on_gpu else 'right'}", flush=True)
    tsn.finalize()


if __name__ == "__main__":
    main()
