"""Send and receive between two ranks: chunks go through a ring of slots at the receiver, which returns credits one by one.

Each block has its own ring for each pair of ranks and sends its share of the chunks. The word that announces a chunk also
holds the message's size in bytes: a receiver that expects another size detects it with the first chunk, and still receives
the whole message, so the next message is not mistaken for its rest.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.launch_args import StreamOrder
from tilescale_net.runtime.profiling import named

from .collective import Collective, StatusRecord, as_bytes, is_integer, report

# A word that announces a chunk: the lower bits hold the message's bytes, the upper bits the chunk's number from 1 on,
# modulo NUMBERS, because words are compared as signed numbers.
SIZE_BITS = 40
NUMBERS = 1 << 22
OTHER_SIZE = 1  # code of a message whose size differs from the receiver's


@tsn.jit(name="send")
def send(n_pes, chunk, slots=2, threads=512, blocks=8, engine="auto", staged=False):
    """Kernel `(x, nbytes, pe, inbox, outbox, arrived, taken, sent)`: sends the first `nbytes` of `x` to `pe`.

    Args:
        n_pes: size of the group.
        chunk: bytes of a slot. slots: slots of a ring.
        threads, blocks, engine: see `tilescale_net.language.put_block`.
        staged: `x` need not be symmetric although `pe` is on another node, because chunks pass through `outbox`.

    `x` [bytes] is uint8. `inbox` [n_pes, blocks, slots, chunk] and, if staged, `outbox` of the same shape, are uint8 and
    symmetric; `arrived` [n_pes, blocks, slots] and `taken` [n_pes, blocks] are signals (uint64, symmetric), `sent` [n_pes,
    blocks] is local uint64 memory. All words are zero before the first message and never reset.
    """
    capacity = T.dynamic("capacity", "int64")

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((capacity,), "uint8"),
        nbytes: T.int64,
        pe: T.int32,
        inbox: T.Tensor((n_pes, blocks, slots, chunk), "uint8"),
        outbox: T.Tensor((n_pes, blocks, slots, chunk) if staged else (1, 1, 1, 1), "uint8"),
        arrived: T.Tensor((n_pes, blocks, slots), "uint64"),
        taken: T.Tensor((n_pes, blocks), "uint64"),
        sent: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            first = T.cast(sent[pe, block], "int64")
            # Blocks without a part announce an empty chunk, which holds the size.
            turns = T.max(T.ceildiv(nbytes, T.int64(blocks * chunk)), T.int64(1))
            for turn in T.serial(turns):
                number = first + turn
                slot = T.cast(number % slots, "int32")
                start = (turn * blocks + block) * T.int64(chunk)
                size = T.min(T.int64(chunk), nbytes - start)
                word = T.cast((((number + 1) % NUMBERS) << T.int64(SIZE_BITS)) | nbytes, "uint64")
                if number >= slots:
                    N.wait_block(taken[pe, block], "ge", number + 1 - slots)
                if size > 0:
                    if staged:
                        N.put_block(outbox[pe, block, slot, 0], x[start], me, count=size, engine="ldst")
                        N.quiet_block(me)
                        N.put_signal_block(
                            inbox[me, block, slot, 0], outbox[pe, block, slot, 0], pe, arrived[me, block, slot], word,
                            count=size, engine=engine,
                        )  # fmt: skip
                    else:
                        N.put_signal_block(
                            inbox[me, block, slot, 0], x[start], pe, arrived[me, block, slot], word,
                            count=size, engine=engine,
                        )  # fmt: skip
                elif thread == 0:
                    N.signal(arrived[me, block, slot], word, pe)
            T.sync_threads()
            if thread == 0:
                sent[pe, block] = T.cast(first + turns, "uint64")
                N.quiet(pe)

    return main


@tsn.jit(name="recv")
def recv(n_pes, chunk, slots=2, threads=512, blocks=8):
    """Kernel `(out, nbytes, pe, inbox, arrived, taken, received, status)`: the next message of `pe`, of `nbytes`, to `out`.

    Args:
        n_pes, chunk, slots, threads, blocks: as in `send`.

    `out`, `nbytes`, `inbox`, `arrived`, `taken` as in `send`; `received` like `sent`. Of a message of another size, as much
    as fits is received, and OTHER_SIZE with the rank and the size is reported to `status` (see `collective.report`).
    """
    capacity = T.dynamic("capacity", "int64")

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((capacity,), "uint8"),
        nbytes: T.int64,
        pe: T.int32,
        inbox: T.Tensor((n_pes, blocks, slots, chunk), "uint8"),
        arrived: T.Tensor((n_pes, blocks, slots), "uint64"),
        taken: T.Tensor((n_pes, blocks), "uint64"),
        received: T.Tensor((n_pes, blocks), "uint64"),
        status: T.Tensor((4,), "int64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            first = T.cast(received[pe, block], "int64")
            turn, turns, coming = (T.alloc_local((1,), "int64") for _ in range(3))
            word = T.alloc_local((1,), "uint64")
            turn[0] = 0
            turns[0] = 1
            while turn[0] < turns[0]:
                number = first + turn[0]
                slot = T.cast(number % slots, "int32")
                announced = (number + 1) % NUMBERS
                if number >= slots and announced < slots:  # the previous chunk in this slot has one of the last numbers
                    word[0] = N.wait(arrived[pe, block, slot], "lt", T.int64(NUMBERS // 2 << SIZE_BITS))
                else:
                    word[0] = N.wait(arrived[pe, block, slot], "ge", announced << T.int64(SIZE_BITS))
                coming[0] = T.cast(word[0] & T.uint64((1 << SIZE_BITS) - 1), "int64")
                turns[0] = T.max(T.ceildiv(coming[0], T.int64(blocks * chunk)), T.int64(1))
                start = (turn[0] * blocks + block) * T.int64(chunk)
                size = T.min(T.int64(chunk), T.min(coming[0], nbytes) - start)
                if size > 0:
                    N.get_block(out[start], inbox[pe, block, slot, 0], me, count=size, engine="ldst")
                T.sync_threads()
                if thread == 0:
                    N.signal(taken[me, block], number + 1, pe)
                turn[0] = turn[0] + 1
            if thread == 0:
                received[pe, block] = T.cast(first + turns[0], "uint64")
                if block == 0:
                    if coming[0] != nbytes:
                        report(status, OTHER_SIZE, pe, coming[0])

    return main


class SendRecv(Collective):
    """Messages between pairs of ranks; constructed by all ranks, then called by sender and receiver.

    Args:
        chunk: bytes of a slot, a multiple of 16. A message of up to 2 * blocks * chunk bytes is sent without waiting for the
            receiver, if it has received the earlier messages.
        threads, blocks: see `Collective`.
        engine: see `put_block`.
        group: the ranks; see `tilescale_net.world`.

    Takes 2 * n_pes * blocks * chunk bytes of the symmetric heap, twice as many if some PEs are on other nodes.

    Raises:
        ValueError: a chunk or a launch geometry that the kernels or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the slots.
    """

    _SLOTS = 2

    def __init__(
        self, *, chunk: int = 1 << 16, threads: int = 512, blocks: int = 8, engine: str = "auto", group: "tsn.Group" = None
    ):  # fmt: skip
        if not is_integer(chunk, 16, 16):
            raise ValueError(f"SendRecv: chunk is {chunk!r}; it must be a positive multiple of 16 bytes")
        super().__init__("SendRecv", f"chunk={chunk}, engine={engine}", threads, blocks, group)
        self._geometry = dict(chunk=chunk, slots=self._SLOTS, threads=threads, blocks=blocks)
        self._engine = engine
        self._record = StatusRecord(self._world)
        slots = self.n_pes, blocks, self._SLOTS
        specs = {"inbox": ((*slots, chunk), torch.uint8), "arrived": (slots, torch.uint64)}
        specs |= {"taken": (slots[:2], torch.uint64)}
        specs |= {"outbox": ((*slots, chunk), torch.uint8)} if self.needs_symmetric_source else {}
        self._memory = self.allocate(specs)
        with torch.inference_mode(False):
            empty = torch.zeros((1, 1, 1, 1), dtype=torch.uint8, device=self.device)
        self._outbox = self._memory.get("outbox", empty)
        self._sent, self._received = self.counters(*slots[:2]), self.counters(*slots[:2])
        self._expected: dict = {}
        # Separate states for messages to a rank and from it.
        self._orders = {(name, pe): StreamOrder(self.device) for name in ("x", "out") for pe in range(self.n_pes)}

    def _release(self) -> None:
        super()._release()
        self._record.close()

    @named("tilescale_net.SendRecv.send")
    def send(self, x: torch.Tensor, pe: int) -> None:
        """Send `x` to rank `pe`; asynchronous on the current stream, whose later work may overwrite `x`.

        Args:
            x: contiguous, of any dtype and size.
            pe: a rank of the group, not this one.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
        """
        tensor = self._message("x", x, "pe", pe)
        memory, staged = self._memory, self.needs_symmetric_source
        kernel = send(self.n_pes, **self._geometry, engine=self._engine, staged=staged)
        kernel(tensor, x.nbytes, pe, memory["inbox"], self._outbox, memory["arrived"], memory["taken"], self._sent)

    @named("tilescale_net.SendRecv.recv")
    def recv(self, out: torch.Tensor, pe: int) -> torch.Tensor:
        """`out` becomes the next message of rank `pe`; asynchronous on the current stream.

        Args:
            out: contiguous, of any dtype, with the bytes of the message.
            pe: a rank of the group, not this one.

        Returns:
            `out`.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was received.
            RankMismatch: the message has another size; raised by the call or, on a GPU, by a later call or `check`.
        """
        tensor = self._message("out", out, "pe", pe)
        memory, status = self._memory, self._record.tensor
        self._expected[pe] = out.nbytes
        kernel = recv(self.n_pes, **self._geometry)
        words = memory["arrived"], memory["taken"], self._received, status
        kernel(tensor, out.nbytes, pe, memory["inbox"], *words)
        # Not `_launch_checked`: after a wait that timed out, the kernel has compared the size of no message.
        self._raise_mismatch_if_simulated()
        return out

    def _message(self, name: str, tensor, pe_name: str, pe) -> torch.Tensor:
        """The bytes of a message, at least one, because kernels need a tensor."""
        self._check_callable()
        self._check(name, tensor)
        if isinstance(pe, bool) or not isinstance(pe, int) or not 0 <= pe < self.n_pes or pe == self.rank:
            raise ValueError(
                f"{self.name}: {pe_name} is {pe!r}; it must be a rank between 0 and {self.n_pes - 1} other than this one, "
                f"{self.rank}"
            )
        if tensor.nbytes >> SIZE_BITS:
            raise ValueError(f"{self.name}: {name} has {tensor.nbytes} bytes; a message has less than {1 << SIZE_BITS}")
        self._orders[name, pe].follow()
        return as_bytes(tensor, tensor.nbytes) if tensor.nbytes else self._outbox.view(-1)[:1]

    def _raise_mismatch(self) -> None:
        code, pe, nbytes = self._record.take()
        if code == OTHER_SIZE:
            raise tsn.RankMismatch(
                f"{self.name}: rank {pe} sent {nbytes} bytes to rank {self.rank}, which expected {self._expected[pe]}; a "
                "tensor must have the same size on both"
            )
