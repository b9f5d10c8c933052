"""Symmetric memory of throughput mode: how many rows there are, and which buffers hold them."""

import torch

from tilescale_net.kernels.collective import BufferSpecs
from tilescale_net.kernels.moe.config import FP8, Config
from tilescale_net.kernels.moe.layout import CountsLayout, most_sent, record_words
from tilescale_net.kernels.moe.row_ops import groups_of


def placement_of(config: Config) -> str:
    """See dispatch_throughput."""
    return "rank" if config.layout == "rank" else "expert" if config.zero_copy else "arrival"


def output_rows(config: Config) -> int:
    """Rows that dispatch gives. A rank has an expert-major row at least for each rank-major one."""
    return rows_received(config) if config.layout == "rank" else config.capacity


def rows_received(config: Config) -> int:
    """Rank-major rows that a rank receives at most."""
    return min(config.ranks * config.max_tokens, config.capacity)


def shared_rows(config: Config, proxied: bool) -> dict[str, tuple[str, int, int, torch.dtype]]:
    """Buffers of rows: "kernel.parameter" -> (the memory that it lies in, rows, columns, dtype).

    Between nodes a dispatch and a combine share memory, each as many rows as a rank sends, and as it receives. A call
    fills them when all ranks have begun it, and so have ended the one before.
    """
    c, placement = config, placement_of(config)
    sent, received = most_sent(c.ranks, c.max_tokens, c.top_k), rows_received(c)
    payload = FP8 if c.quantize_combine else c.combine_dtype
    arrivals = placement == "arrival" or (proxied and placement == "expert")
    return {
        "dispatch.arrival": ("received", received if arrivals else 1, c.row_words, torch.int32),
        "dispatch.staged": ("sent", sent if proxied else 1, c.row_words, torch.int32),
        "combine.slots": ("sent", sent, c.hidden, payload),
        "combine.staged": ("received", received if proxied else 1, c.hidden, payload),
    }


def symmetric_buffers(config: Config, tuning, proxied: bool) -> BufferSpecs:
    """Symmetric memory of the mode: "kernel.parameter" -> (shape, dtype)."""
    c, R, M = config, config.ranks, config.max_tokens
    counts, W, placement = CountsLayout(c.num_experts, R), record_words(c.top_k), placement_of(c)
    scales, G, chunks = max(c.scale_words, 1), groups_of(c.hidden), -(-M // tuning.chunk)
    own = output_rows(c) if placement != "arrival" else 1
    ints, floats, words = torch.int32, torch.float32, torch.uint64
    shared = shared_rows(config, proxied)
    rows = {name: count for name, (_, count, _, _) in shared.items()}
    memory = {"sent": 0, "received": 0}
    for where, count, columns, dtype in shared.values():
        memory[where] = max(memory[where], count * columns * dtype.itemsize // 4)

    def scaled(rows: int) -> int:
        return rows if c.scale_words else 1

    def quantised(rows: int) -> int:
        return rows if c.quantize_combine else 1

    return {
        "routing.counts_out": ((counts.words,), ints),
        "routing.counts_in": ((R, counts.words), ints),
        "routing.records_out": ((R, M, W), ints),
        "routing.records_in": ((R, M, W), ints),
        "routing.counts_ready": ((R,), words),
        "routing.records_ready": ((R,), words),
        "routing.blocks_ready": ((1,), words),
        "output.rows": ((own, c.hidden), c.dtype),
        "output.scales": ((scaled(own), scales), floats),
        "rows.sent": ((memory["sent"],), ints),
        "rows.received": ((memory["received"],), ints),
        "dispatch.arrival_scales": ((scaled(rows["dispatch.arrival"]), scales), ints),
        "dispatch.staged_scales": ((scaled(rows["dispatch.staged"]), scales), ints),
        "dispatch.ready": ((R,), words),
        "dispatch.arrived": ((R, chunks), words),
        "dispatch.done": ((R,), words),
        **({"dispatch.counted": ((c.tiles + 1,), words)} if c.tiles else {}),
        "combine.slot_scales": ((quantised(rows["combine.slots"]), G), floats),
        "combine.slot_values": ((rows["combine.slots"], c.top_k), floats),
        "combine.staged_scales": ((quantised(rows["combine.staged"]), G), floats),
        "combine.staged_values": ((rows["combine.staged"], c.top_k), floats),
        "combine.ready": ((R,), words),
        "combine.arrived": ((R, chunks), words),
        "combine.done": ((R,), words),
    }


def new_scales(config: Config, device: torch.device, by_column: bool = False) -> torch.Tensor:
    """Memory for the scales of an output, [rows, scale_words]."""
    shape = output_rows(config), config.scale_words
    new = torch.empty(shape[::-1] if by_column else shape, dtype=torch.float32, device=device)
    return new.t() if by_column else new


def copy_output(targets: tuple, sources: tuple) -> None:
    """Rows and scales to where the caller wants them; None for scales that do not exist."""
    for target, source in zip(targets, sources):
        if target is not None:
            target.copy_(source)
