"""Sizes of dispatch in latency mode; see dispatch_latency.py, and dispatch_latency_tensors.py for the tensors of these sizes."""

from dataclasses import dataclass

from tilescale_net.kernels.moe.latency_messages import Header, Message
from tilescale_net.kernels.moe.row_ops import batch_of


@dataclass(frozen=True)
class Sizes:
    """Compile-time sizes and choices; see dispatch_latency."""

    ranks: int
    experts: int
    top_k: int
    max_tokens: int
    row_words: int
    scale_words: int
    source_dtype: str
    blocks: int
    threads: int
    node_size: int = 0  # ranks of a node, where rows cross the network once per node
    timed: bool = False

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_size if self.node_size else 0

    @property
    def bins(self) -> int:
        return self.experts + self.ranks + self.nodes

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def capacity(self) -> int:
        """Rows of an expert."""
        return self.ranks * self.max_tokens

    @property
    def message(self) -> Message:
        return Message(self.row_words, self.scale_words, self.top_k, self.nodes > 0)

    @property
    def header(self) -> Header:
        return Header(self.local, self.nodes > 0)

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def quantise(self) -> bool:
        return self.source_dtype != ""

    @property
    def source_type(self) -> str:
        return self.source_dtype or "int32"

    @property
    def source_width(self) -> int:
        """Elements of a row as the caller has it."""
        return self.row_words * 4 if self.quantise else self.row_words

    @property
    def width(self) -> int:
        """Elements of 16 bytes of such a row."""
        return 4 if self.source_type in ("float32", "int32") else 8

    @property
    def units(self) -> int:
        """Pieces of 16 bytes in such a row."""
        return self.source_width // self.width

    @property
    def batch(self) -> int:
        """Pieces of a thread; a block holds a whole row."""
        return -(-self.units // self.threads)

    @property
    def row_batch(self) -> int:
        """Pieces of a lane and batch of a row as it travels."""
        return batch_of(self.row_words // 4, 16)
