"""The kinds of races that Triton's GSan tests and compute-sanitizer's racecheck know, as small kernels, and who finds which.

`python -m tests.simulator.races_of_the_field` writes the table of docs/simulator.md again.
"""

from dataclasses import dataclass
from pathlib import Path

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import f32, u64

THREADS = 64


@dataclass(frozen=True)
class Kind:
    """A kind of race.

    Attributes:
        gsan: what Triton's GSan does with it, from its tests and its proposal; on GPUs.
        racecheck: what compute-sanitizer's racecheck does with it, from the manual and release notes of its version 2026.4; on
            GPUs.
        ours: words of the race detector's report of the wrong form; "" for no report. The right form is silent.
    """

    name: str
    gsan: str
    racecheck: str
    ours: str
    how: str = "yes"


YES, RULES, NO, MANUAL = "yes, a test of its own", "yes, by its rules", "no", "yes"
WARNING, NOTES, ASYNC = "yes, as a warning", "yes, by its release notes", "yes, of copies in a group or pipeline"
GLOBAL = "no: shared memory only"
SHARED = "no: global memory only"
ONE = "no: one GPU"
BLOCK = "no: a block is one thread"
KINDS = {
    "raw": Kind("global memory: read after write, a relaxed counter between", YES, GLOBAL, "a load of data"),
    "war": Kind("global memory: write after read, a relaxed counter between", YES, GLOBAL, "a store to data"),
    "waw": Kind("global memory: write after write, a relaxed counter between", YES, GLOBAL, "a store to data"),
    "tile_raw": Kind("a tile stored by T.copy (TMA on a GPU), then read by another block", YES, GLOBAL, "a load of data"),
    "tile_war": Kind("a tile loaded by T.copy (TMA on a GPU), then written by another block", YES, GLOBAL, "a store to"),
    "scope": Kind("release and acquire of the block's scope between blocks", RULES, GLOBAL, "a load of data"),
    "transitive": Kind("a chain of words of which one link is relaxed", RULES, GLOBAL, "a load of data"),
    "count": Kind("many writers, one counter, a relaxed one among its adds", RULES, GLOBAL, "a load of data"),
    "block": Kind("global memory: threads of one block without a barrier", BLOCK, GLOBAL, "T.sync_threads() is missing"),
    "peers": Kind("symmetric memory: a peer's data without any order", YES, ONE, "nothing orders the two"),
    "peer_word": Kind("symmetric memory: a relaxed store to the peer's word, an acquire load there", RULES, ONE, "view"),
    "pulled": Kind("symmetric memory: a relaxed store to the own word, an acquire load by the peer", RULES, ONE, "view"),
    "peer_scope": Kind("symmetric memory: atomics of the GPU's scope between GPUs", RULES, ONE, "does not hold the other"),
    "plain": Kind("symmetric memory: a plain load of a word that the peer stores atomically", RULES, ONE, "nothing orders the two"),
    "shared_raw": Kind("shared memory: read after write without a barrier", SHARED, MANUAL, "T.sync_threads() is missing"),
    "shared_war": Kind("shared memory: write after read without a barrier", SHARED, MANUAL, "T.sync_threads() is missing"),
    "shared_waw": Kind("shared memory: write after write, other values", SHARED, MANUAL, "one thread is to store"),
    "shared_warp": Kind("shared memory: lanes of a warp without __syncwarp", SHARED, WARNING, "T.sync_warp()"),
    "shared_some": Kind("shared memory: a named barrier that some writers do not reach", SHARED, NOTES, "(shared memory)"),
    "mbarrier": Kind("shared memory: read before the wait for an mbarrier", SHARED, MANUAL, "(shared memory)"),
    "async": Kind(
        "shared memory: read before the end of an asynchronous copy, behind a barrier", SHARED, ASYNC, "",
        "no: copies are done when the call returns",
    ),
    "put": Kind("a put without a fence before its signal", NO, NO, "N.fence"),
    "source": Kind("a source written before the quiet", NO, NO, "N.quiet"),
}  # fmt: skip
CASES = {name: number for number, name in enumerate(KINDS)}


@T.macro
def _spin(words, index, order, scope, least=1):
    while N.ld(words[index], sem=order, scope=scope) < T.uint64(least):
        T.evaluate(0)


# Without this tilelang puts a barrier between any two accesses to shared memory.
@tsn.jit(pass_configs={"tl.disable_thread_storage_sync": True})
def races(right):
    """Kernel `(case, data, word, x, y, flag, out)`: one of the kinds, with what orders it or without.

    Args of the kernel: data, word and out are tensors of the rank, x, y and flag symmetric ones.
    """
    release, acquire = ("release", "acquire") if right else ("relaxed", "relaxed")
    scope = "gpu" if right else "cta"

    @T.prim_func
    def main(
        ctx: N.Context(), case: T.int32, data: f32(THREADS), word: u64(2), x: f32(THREADS), y: f32(THREADS), flag: u64(2),
        out: f32(4, THREADS),
    ):  # fmt: skip
        with T.Kernel(3, threads=THREADS) as block:
            tx, pe = T.get_thread_binding(), 1 - N.my_pe()
            tile = T.alloc_shared((THREADS,), "float32")
            full = T.alloc_barrier(32)
            first = tx == 0
            for name in ("raw", "war", "waw"):
                if case == CASES[name]:
                    if block == 0 and first:
                        if name == "war":
                            out[0, 0] = data[0]
                        else:
                            data[0] = 1.0
                        T.atomic_add(word[0], T.uint64(1), memory_order=release)
                    if block == 1 and first:
                        _spin(word, 0, acquire, "gpu")
                        if name == "raw":
                            out[0, 0] = data[0]
                        else:
                            data[0] = 2.0
            if case == CASES["tile_raw"]:
                if block == 0:
                    tile[tx] = 1.0
                    T.sync_threads()
                    T.copy(tile, data)
                    T.sync_threads()
                    if first:
                        T.atomic_add(word[0], T.uint64(1), memory_order=release)
                if block == 1 and first:
                    _spin(word, 0, acquire, "gpu")
                    out[0, 0] = data[5]
            if case == CASES["tile_war"]:
                if block == 0:
                    T.copy(data, tile)
                    T.sync_threads()
                    out[0, tx] = tile[tx]
                    if first:
                        T.atomic_add(word[0], T.uint64(1), memory_order=release)
                if block == 1 and first:
                    _spin(word, 0, acquire, "gpu")
                    data[5] = 2.0
            if case == CASES["scope"]:
                if block == 0 and first:
                    data[0] = 1.0
                    N.st(word[0], T.uint64(1), sem="release", scope=scope)
                if block == 1 and first:
                    _spin(word, 0, "acquire", scope)
                    out[0, 0] = data[0]
            if case == CASES["transitive"]:
                if block == 0 and first:
                    data[0] = 1.0
                    N.st(word[0], T.uint64(1), sem="release", scope="gpu")
                if block == 1 and first:
                    _spin(word, 0, acquire, "gpu")
                    N.st(word[1], T.uint64(1), sem="release", scope="gpu")
                if block == 2 and first:
                    _spin(word, 1, "acquire", "gpu")
                    out[0, 0] = data[0]
            if case == CASES["count"]:
                if block == 0 and first:
                    data[0] = 1.0
                    T.atomic_add(word[0], T.uint64(1), memory_order="release")
                if block == 1 and first:
                    data[1] = 1.0
                    T.atomic_add(word[0], T.uint64(1), memory_order=release)
                if block == 2 and first:
                    _spin(word, 0, "acquire", "gpu", 2)
                    out[0, 0] = data[0] + data[1]
            if case == CASES["block"] and block == 0:
                data[tx] = 1.0
                if right:
                    T.sync_threads()
                out[0, tx] = data[THREADS - 1 - tx]
            if case == CASES["peers"] and block == 0:
                y[tx] = 1.0
                if right:
                    N.barrier_all()
                out[0, tx] = N.remote(y, pe)[tx]
            if case == CASES["peer_word"] and block == 0 and first:
                y[0] = 1.0
                N.st(N.remote(flag, pe)[0], T.uint64(1), sem=release, scope="sys")
                _spin(flag, 0, "acquire", "sys")
                out[0, 0] = N.remote(y, pe)[0]
            if case == CASES["pulled"] and block == 0 and first:
                y[0] = 1.0
                N.st(flag[0], T.uint64(1), sem=release, scope="sys")
                _spin(N.remote(flag, pe), 0, "acquire", "sys")
                out[0, 0] = N.remote(y, pe)[0]
            if case == CASES["peer_scope"] and block == 0 and first:
                if right:
                    N.atomic_add(flag[0], T.uint64(1), pe)
                else:
                    T.atomic_add(N.remote(flag, pe)[0], T.uint64(1), memory_order="release")
                _spin(flag, 0, "acquire", "sys")
            if case == CASES["plain"] and block == 0 and first:
                N.st(N.remote(flag, pe)[0], T.uint64(1), sem="release", scope="sys")
                if right:
                    out[0, 0] = T.cast(N.ld(flag[0], sem="relaxed", scope="sys"), "float32")
                else:
                    out[0, 0] = T.cast(flag[0], "float32")
            if case == CASES["shared_raw"]:
                tile[tx] = 1.0
                if right:
                    T.sync_threads()
                out[block, tx] = tile[THREADS - 1 - tx]
            if case == CASES["shared_war"]:
                tile[tx] = 1.0
                T.sync_threads()
                out[block, tx] = tile[THREADS - 1 - tx]
                if right:
                    T.sync_threads()
                tile[tx] = 2.0
            if case == CASES["shared_waw"]:
                if right:
                    if first:
                        tile[0] = T.cast(tx, "float32")
                else:
                    tile[0] = T.cast(tx, "float32")
            if case == CASES["shared_warp"] and tx < 32:
                tile[tx] = 1.0
                if right:
                    T.sync_warp()
                out[block, tx] = tile[31 - tx]
            if case == CASES["shared_some"]:
                tile[tx] = 1.0
                if right:
                    T.sync_threads()
                elif tx < 32:
                    T.sync_threads(1, 32)
                if tx < 32:
                    out[block, tx] = tile[tx + 32]
            if case == CASES["mbarrier"]:
                if tx < 32:
                    tile[tx] = 1.0
                    T.barrier_arrive(full[0])
                else:
                    if right:
                        T.barrier_wait(full[0], 0)
                    out[block, tx] = tile[tx - 32]
            if case == CASES["async"]:
                T.async_copy(data, tile)
                if right:
                    T.ptx_wait_group(0)
                T.sync_threads()
                out[block, tx] = tile[THREADS - 1 - tx]
            if case == CASES["put"] and block == 0:
                N.put_block(y, x, pe)
                N.signal_block(flag[0], 1, pe, fence=right)
                N.wait_block(flag[0], "ge", 1)
                out[0, tx] = y[tx]
            if case == CASES["source"] and block == 0:
                N.put_block(y, x, pe)
                if right:
                    N.quiet_block(pe)
                x[tx] = 2.0

    return main


def table() -> str:
    """The tools that find each kind, as Markdown."""
    rows = [f"| {kind.name} | {kind.gsan} | {kind.racecheck} | {kind.how} |" for kind in KINDS.values()]
    titles = ["| kind of race | GSan, on a GPU | racecheck, on a GPU | the race detector, without one |"]
    return "\n".join([BEGIN, *titles, "| --- | --- | --- | --- |", *rows, END])


BEGIN, END = "<!-- made by python -m tests.simulator.races_of_the_field -->", "<!-- end of the kinds -->"
PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def of_page(text: str) -> str:
    """The table that a page holds."""
    return text[text.index(BEGIN) : text.index(END) + len(END)]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(of_page(page), table()))
