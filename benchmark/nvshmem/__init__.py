"""NVSHMEM baselines: real NVSHMEM kernels, compiled on first use, timed next to ours."""

from benchmark.nvshmem.library import Nvshmem, missing

__all__ = ["Nvshmem", "missing"]
